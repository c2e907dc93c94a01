"""The draft vocabulary: which target ids the draft can say, as `d2t` and `t2d`.

`d2t` [Vd] int64 holds offsets: draft id i stands for target id i + d2t[i]. `t2d` [V] bool is True on kept target ids.
Draft ids ascend with target ids, so `flatnonzero(t2d) == arange(Vd) + d2t`.
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


def pinned_ids(tokenizer: Any) -> list[int]:
    """Ids that are kept whatever the corpus: added tokens, but for reserved ones, and the 256 single bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = tokenizer.get_vocab()
    idle = ("reserved", "unused", "placeholder", "extra_id")
    added = [i for i, t in tokenizer.added_tokens_decoder.items() if not any(w in t.content for w in idle)]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    single = fallback if fallback[0] in vocab else ByteLevel.alphabet()
    return sorted({*added, *(vocab[s] for s in single if s in vocab)})


def build_vocab_mapping(
    counts: np.ndarray, size: int, pinned: list[int] | None = None, usable: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(d2t [size] int64, t2d [V] bool): the pinned ids, then the most frequent, ties and unseen ones by lowest id.

    `counts` [V]: occurrences of each target id among supervised tokens. Ids from `usable` on are padding of the
    model's vocabulary and never chosen. A smaller kept set is contained in every larger one.
    Raises EyasError when `size` ids cannot be chosen or the pinned ones do not fit.
    """
    V, pins = len(counts), np.unique(np.array(pinned or [], dtype=np.int64))
    usable = V if usable is None else min(usable, V)
    if not 1 <= size <= usable:
        raise EyasError(f"vocab.size: expected 1 to {usable} (the target's real tokens), found {size}")
    if (
        counts.ndim != 1
        or counts.min() < 0
        or counts[usable:].any()
        or (len(pins) and not 0 <= pins[0] <= pins[-1] < usable)
    ):
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
    """Raises EyasError unless both tables are absent, or together are a mapping into `vocab_size` target ids.

    Takes NumPy arrays or CPU tensors.
    """
    if d2t is None and t2d is None:
        return
    if d2t is None or t2d is None:
        missing = "d2t" if d2t is None else "t2d"
        raise EyasError(f"{missing} is missing: a draft vocabulary needs both d2t and t2d, or neither")
    offsets, kept = np.asarray(d2t), np.asarray(t2d)
    if kept.shape != (vocab_size,) or kept.dtype != np.bool_:
        raise EyasError(f"t2d: expected 1-D bool of length {vocab_size}, found {kept.dtype} of shape {kept.shape}")
    if offsets.ndim != 1 or offsets.dtype != np.int64:
        raise EyasError(f"d2t: expected 1-D int64, found {offsets.dtype} of shape {offsets.shape}")
    hint = "d2t holds offsets: target id = draft id + d2t[draft id]"
    targets = np.arange(len(offsets)) + offsets
    for row in np.flatnonzero((targets < 0) | (targets >= vocab_size))[:1]:
        raise EyasError(
            f"d2t: draft row {row} decodes to target id {targets[row]}, outside 0..{vocab_size - 1}", hint
        )
    for row in np.flatnonzero(np.diff(targets) <= 0)[:1]:
        if same := np.flatnonzero(targets == targets[row + 1])[:-1].tolist():
            raise EyasError(
                f"d2t: draft rows {same[0]} and {row + 1} both decode to target id {targets[row + 1]}", hint
            )
        raise EyasError(f"d2t: target ids do not ascend at draft row {row + 1}", hint)
    if not np.array_equal(np.flatnonzero(kept), targets):
        raise EyasError(
            f"t2d keeps {kept.sum()} ids, d2t decodes to {len(targets)}; they must be the same ids", hint
        )


def read_vocab_mapping(folder: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(d2t, t2d) of a finished vocab stage, checked; None for the full vocabulary."""
    from safetensors.numpy import load_file

    path = folder / "vocab.safetensors"
    if not path.is_file():
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
    counts = {split: np.zeros(V, dtype=np.int64) for split in ("train", "heldout")}
    for sample in read_samples(path, target=spec):
        if (highest := sample.token_ids.max()) >= V:
            hint = "tokenizer and model do not belong together"
            raise EyasError(f"{path}: sample {sample.id} has token id {highest}, the target has {V} ids", hint)
        counts[sample.split] += np.bincount(sample.token_ids[sample.loss_mask], minlength=V)
    usable = min(noted["tokenizer_length"], V)
    pins = [i for i in {*noted["pinned_ids"], *spec.eos_token_ids} if i < usable]
    d2t, t2d = np.zeros(V, dtype=np.int64), np.ones(V, dtype=np.bool_)
    if size < V:
        d2t, t2d = build_vocab_mapping(counts["train"], min(size, usable), pins, usable)
        check_vocab_mapping(d2t, t2d, V)
        with atomic(ctx.out / "vocab.safetensors") as temporary:
            save_file({"d2t": d2t, "t2d": t2d}, temporary, {"format": "eyas-vocab", "d2t": "offsets"})
    chosen = t2d.copy()
    chosen[pins] = False
    coverage = {k: round(float(n[t2d].sum() / n.sum()), 6) if n.any() else None for k, n in counts.items()}
    last = len(d2t) - 1
    result = {
        "counts": {
            "target_vocab": V,
            "draft_vocab": len(d2t),
            "distinct": int((counts["train"] > 0).sum()),
            "pinned": len(pins),
            "by_frequency": int((counts["train"][chosen] > 0).sum()),
            "never_seen": int((counts["train"][chosen] == 0).sum()),
            "supervised": int(counts["train"].sum()),
        },
        "full_vocabulary": size >= V,
        "coverage": coverage["train"],
        "coverage_heldout": coverage["heldout"],
        "tokenizer_length": noted["tokenizer_length"],
        "padding_rows": V - usable,
        "d2t": f"offsets: draft id {last} + {d2t[last]} = target id {last + d2t[last]}",
    }
    say(
        f"draft vocabulary {len(d2t)} of {V} ({len(pins)} pinned, {result['counts']['by_frequency']} by frequency, "
        f"{result['counts']['never_seen']} never seen) covers {coverage['train']:.2%} of supervised tokens; "
        f"d2t holds {result['d2t']}"
    )
    if noted["tokenizer_length"] != V:
        say(f"the tokenizer has {noted['tokenizer_length']} ids, the model {V}: ids of no token are never chosen")
    return result
