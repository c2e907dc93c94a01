"""Vocabulary: do d2t and t2d say one mapping, of the size that is asked for, and does it hold what is learnt?"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from eyas.errors import EyasError
from eyas.pipeline import read_manifest
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.vocab import check_vocab_mapping

AGAIN = "run `eyas vocab` again"
APART = 0.15  # how far coverage of the samples may lie from what was noted for all data


def tables_are_one_mapping(s: Subject) -> Iterator[Finding]:
    folder, size = s.folder("vocab"), s.spec.vocab_size
    path, asked = folder / "vocab.safetensors", s.config.vocab.size
    then = (read_manifest(folder) or {}).get("inputs", {}).get("prepare")
    now = (read_manifest(Path(s.config.run_dir) / "prepare") or {}).get("digest")  # may be another tool's work
    if then and now and then != now:
        yield error(f"{folder} was counted from other samples (digest {then[:12]}, now {now[:12]})", AGAIN)
    if not path.is_file():
        if asked < size:
            yield error(f"{path} is missing: vocab.size {asked} of the target's {size} needs it", AGAIN)
        else:
            yield info(f"the draft keeps all {size:,} ids of the target")
        return
    try:
        tables = load_file(path)
    except SafetensorError as e:
        yield error(f"{path} ({path.stat().st_size} bytes) cannot be read: {e}", AGAIN)
        return
    d2t, t2d = tables.get("d2t"), tables.get("t2d")
    try:
        check_vocab_mapping(d2t, t2d, size)
    except EyasError as e:
        hint = "these are target ids, not offsets: subtract 0, 1, ..." if absolute(d2t, t2d) else e.hint
        yield error(f"{path}: {e.message}", hint or AGAIN)
        return
    if d2t is None:
        yield error(f"{path} holds neither d2t nor t2d", AGAIN)
        return
    ids, known = np.arange(len(d2t)) + d2t, s.prepared.noted.get("tokenizer_length", size) if now else size
    if len(d2t) != (wanted := min(asked, known, size)):
        text = f"{path} maps {len(d2t)} ids, vocab.size {asked} asks for {wanted}"
        yield error(text, f"{AGAIN}: the table on disk is of another config")
    if beyond := int((ids >= known).sum()):
        text = f"{path}: {beyond} ids, such as {ids[ids >= known][0]}, are padding behind the tokenizer's {known}"
        yield error(text, AGAIN)
    if absent := [i for i in s.spec.eos_token_ids if i < size and i not in ids]:
        yield error(f"{path} leaves out the end-of-turn token {absent}: the draft could never propose it", AGAIN)
    text = f"{len(d2t):,} of {size:,} ids; d2t holds offsets: draft id {len(d2t) - 1} is target id {ids[-1]}"
    yield info(text)


def absolute(d2t: np.ndarray | None, t2d: np.ndarray | None) -> bool:
    return d2t is not None and t2d is not None and np.flatnonzero(t2d).tolist() == d2t.flatten().tolist()


def supervised_tokens_are_covered(s: Subject) -> Iterator[Finding]:
    path = s.folder("vocab") / "vocab.safetensors"
    if not path.is_file():
        yield info("all ids are kept: every supervised token can be proposed")
        return
    kept = torch.from_numpy(load_file(path)["t2d"])
    tokens = torch.cat([f.token_ids[f.loss_mask].long() for f in s.store.spread(64)])
    share = float(kept[tokens].float().mean())
    counts = tokens[~kept[tokens]].bincount()
    missing = [s.tokenizer.decode([i]) for i in counts.argsort(descending=True)[: min(8, int((counts > 0).sum()))]]
    result = s.folder("vocab") / "result.json"
    noted = json.loads(result.read_text()).get("coverage") if result.is_file() else None
    evidence = {"coverage": share, "noted": noted, "tokens": len(tokens), "most_missed": missing}
    text = f"{share:.1%} of {len(tokens):,} sampled supervised tokens can be proposed"
    error_of_share = 3 * (0.25 / max(len(tokens), 1)) ** 0.5
    if noted is not None and share < noted - max(APART, error_of_share):
        text += f", {noted:.1%} when it was made: it was counted on other data, or by another tokenizer"
        yield error(text, AGAIN, evidence)
    elif noted is None and share < 0.5:
        yield error(
            f"{text}: made from other data or with another tokenizer?", f"{AGAIN}, or raise vocab.size", evidence
        )
    elif share < 0.8:
        yield warning(text, "no other token can ever be accepted: raise vocab.size", evidence)
    else:
        yield info(text, evidence=evidence)


CHECKS = [
    Check("tables", "vocab", ("target",), tables_are_one_mapping),
    Check("coverage", "vocab", ("tables", "contract"), supervised_tokens_are_covered),
]
