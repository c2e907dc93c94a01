"""The draft vocabulary: which target ids the draft can say, as `d2t` and `t2d`.

`d2t` [Vd] int64 holds offsets: draft id i stands for target id i + d2t[i]. `t2d` [V] bool is True on kept target
ids. Draft ids ascend with target ids, so `flatnonzero(t2d) == arange(Vd) + d2t`.
"""

from pathlib import Path
from typing import Any

import numpy as np

from eyas.data.samples import read_metadata, read_samples
from eyas.errors import EyasError
from eyas.files import atomic
from eyas.pipeline import Context
from eyas.progress import say
from eyas.target.spec import TargetSpec


def vocab_facts(tokenizer: Any) -> dict[str, Any]:
    """What this stage needs of a tokenizer, noted by prepare: ids to keep whatever the corpus, and the length."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab, idle = tokenizer.get_vocab(), ("reserved", "unused", "placeholder", "extra_id")
    added = [i for i, t in tokenizer.added_tokens_decoder.items() if not any(w in t.content for w in idle)]
    bytes = [f"<0x{byte:02X}>" for byte in range(256)] if "<0x00>" in vocab else ByteLevel.alphabet()
    byte_ids = sorted(vocab[s] for s in bytes if s in vocab)
    return {"added_ids": added, "byte_ids": byte_ids, "tokenizer_length": max(vocab.values()) + 1}


def build_vocab_mapping(
    counts: np.ndarray, size: int, pinned: list[int] | None = None, usable: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(d2t [size] int64, t2d [V] bool): the pinned ids, then the most frequent, ties and unseen ones by lowest id,
    so that a smaller kept set is contained in every larger one.

    `counts` [V]: occurrences of each target id among supervised tokens. Ids from `usable` on are padding of the
    model's vocabulary and never chosen. Raises EyasError when the sizes do not fit.
    """
    V, pins = len(counts), np.unique(np.array(pinned or [], dtype=np.int64))
    usable = min(V if usable is None else usable, V)
    if not 1 <= size <= usable:
        raise EyasError(f"vocab.size: expected 1 to {usable} (the target's real tokens), found {size}")
    if counts[usable:].any() or (len(pins) and not 0 <= pins[0] <= pins[-1] < usable):
        raise EyasError(f"counts and pinned ids must lie in the {usable} real tokens of a vocabulary of {V}")
    if len(pins) > size:
        raise EyasError(f"vocab.size {size} is less than the {len(pins)} pinned ids", f"use at least {len(pins)}")
    order = np.argsort(-counts[:usable], kind="stable")
    order = np.concatenate([pins, order[~np.isin(order, pins)]])[:size]
    t2d = np.zeros(V, dtype=np.bool_)
    t2d[order] = True
    return np.flatnonzero(t2d) - np.arange(size), t2d


def build_vocab_mappings_from_distribution(
    token_freq_dict: dict[int, int], draft_vocab_size: int, target_vocab_size: int
) -> tuple[Any, Any]:
    """(d2t [Vd] int64 offsets, t2d [V] bool) as torch tensors, from a {token id: count} mapping."""
    import torch

    counts = np.zeros(target_vocab_size, dtype=np.int64)
    for token, count in token_freq_dict.items():
        if not 0 <= int(token) < target_vocab_size:
            raise EyasError(f"token id {token} is outside the target's vocabulary of {target_vocab_size}")
        counts[int(token)] = count
    d2t, t2d = build_vocab_mapping(counts, draft_vocab_size)
    return torch.from_numpy(d2t), torch.from_numpy(t2d)


def check_vocab_mapping(d2t: Any, t2d: Any, vocab_size: int) -> None:
    """Raises EyasError unless both tables (NumPy or CPU tensors) are absent, or are a mapping into the target."""
    if d2t is None and t2d is None:
        return
    for name, table in (("d2t", d2t), ("t2d", t2d)):
        if table is None:
            raise EyasError(f"{name} is missing: a draft vocabulary needs both d2t and t2d, or neither")
    offsets, kept = np.asarray(d2t), np.asarray(t2d)
    if kept.shape != (vocab_size,) or kept.dtype != np.bool_:
        raise EyasError(f"t2d: expected 1-D bool of length {vocab_size}, found {kept.dtype} of shape {kept.shape}")
    if offsets.ndim != 1 or offsets.dtype != np.int64:
        raise EyasError(f"d2t: expected 1-D int64, found {offsets.dtype} of shape {offsets.shape}")
    hint = "d2t holds offsets: target id = draft id + d2t[draft id]"
    ids = np.arange(len(offsets)) + offsets
    for row in np.flatnonzero((ids < 0) | (ids >= vocab_size))[:1]:
        raise EyasError(f"d2t: draft row {row} decodes to target id {ids[row]}, outside 0..{vocab_size - 1}", hint)
    for row in np.flatnonzero(np.diff(ids) <= 0)[:1] + 1:
        if same := np.flatnonzero(ids[:row] == ids[row]).tolist():
            raise EyasError(f"d2t: draft rows {same[0]} and {row} both decode to target id {ids[row]}", hint)
        raise EyasError(f"d2t: target ids do not ascend at draft row {row}", hint)
    if not np.array_equal(np.flatnonzero(kept), ids):
        raise EyasError(f"t2d keeps {kept.sum()} ids, d2t decodes to {len(ids)}: not the same ids", hint)


def read_vocab_mapping(folder: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(d2t, t2d) of a finished vocab stage, checked; None for the full vocabulary."""
    from safetensors.numpy import load_file

    if not (path := folder / "vocab.safetensors").is_file():
        return None
    tables = load_file(path)
    check_vocab_mapping(tables.get("d2t"), tables.get("t2d"), vocab_size)
    return tables["d2t"], tables["t2d"]


def run(ctx: Context) -> dict[str, Any]:
    """Write `vocab.safetensors`, unless the draft keeps the target's full vocabulary."""
    from safetensors.numpy import save_file

    spec = TargetSpec.load(ctx.config.target.model, ctx.config.target.revision)
    path, V, size = ctx.input("prepare") / "samples.parquet", spec.vocab_size, ctx.config.vocab.size
    noted = read_metadata(path)
    split = {name: np.zeros(V, dtype=np.int64) for name in ("train", "heldout")}
    for sample in read_samples(path, target=spec):
        if (highest := sample.token_ids.max()) >= V:
            hint = "tokenizer and model do not belong together"
            raise EyasError(f"{path}: sample {sample.id} has token id {highest}, the target has {V} ids", hint)
        split[sample.split] += np.bincount(sample.token_ids[sample.loss_mask], minlength=V)
    counts, usable = split["train"], min(noted["tokenizer_length"], V)
    pinned = sorted({i for i in [*noted["added_ids"], *spec.eos_token_ids] if i < usable})
    d2t, t2d = np.zeros(V, dtype=np.int64), np.ones(V, dtype=np.bool_)
    if size < V:
        # Any text can be said with the single bytes, so they rank with the 512 most frequent ids.
        ranked = counts.copy()
        ranked[noted["byte_ids"]] = np.maximum(counts[noted["byte_ids"]], np.sort(counts)[-min(512, V)])
        d2t, t2d = build_vocab_mapping(ranked, min(size, usable), pinned, usable)
        with atomic(ctx.out / "vocab.safetensors") as temporary:
            save_file({"d2t": d2t, "t2d": t2d}, temporary, {"d2t": "offsets"})  # one key: their order is not fixed
    coverage = {k: round(float(n[t2d].sum() / n.sum()), 6) if n.any() else None for k, n in split.items()}
    n = {"target_vocab": V, "draft_vocab": len(d2t), "distinct": int((counts > 0).sum()), "pinned": len(pinned)}
    n["by_frequency"] = int((np.delete(counts * t2d, pinned) > 0).sum())
    n |= {"never_seen": len(d2t) - len(pinned) - n["by_frequency"], "supervised": int(counts.sum())}
    last = len(d2t) - 1
    result = {
        "full_vocabulary": size >= V,
        "coverage": coverage["train"],
        "coverage_heldout": coverage["heldout"],
        "tokenizer_length": noted["tokenizer_length"],
        "d2t": f"offsets: draft id {last} + {d2t[last]} = target id {last + d2t[last]}",
    }
    say("draft vocabulary: " + ", ".join(f"{name} {value}" for name, value in (n | result).items()))
    return {"counts": n} | result
