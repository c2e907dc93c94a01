"""Model: does the draft build, and does training it fit into the memory that is really there?"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from eyas.config import TrainConfig
from eyas.draft import Eagle3DraftConfig
from eyas.preflight.finding import Check, Finding, Subject, error, info

# All zero, these say nothing; other tensors may well begin there.
SPEAKING = {"embed_tokens", "target_lm_head", "lm_head.weight", "norm.weight", "fc.weight"}


def draft_builds_and_fits(s: Subject) -> Iterator[Finding]:
    with torch.device("meta"):  # shapes alone: nothing is allocated
        model = s.new_draft()
    shape, device = model.config, s.config.torch_device()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    text = f"{trained:,} trainable parameters, {shape.draft_vocab_size:,} of {shape.vocab_size:,} token ids"
    yield info(text, evidence=shape.to_dict())
    share = float(s.store.supervised_counts.sum() / s.store.lengths.sum())
    parts = memory_parts(shape, s.config.train, trained, share, device)
    need, free = sum(parts.values()), available_memory(device)
    listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    text = f"training takes about {need / 1e9:.2f} GB ({listed}); {free / 1e9:.2f} GB are free on {device}"
    level = "error" if need > free else "warning" if need > 0.8 * free else "info"
    fits = largest_batch(parts, s.config.train.batch_tokens, free)
    advice = (
        f"set train.batch_tokens to {fits} or less" if fits else "no batch fits beside the weights: another device"
    )
    hint = "" if level == "info" else f"{advice}; or lower train.ttt_steps, or free memory"
    yield Finding(
        level, text, hint, {"need_bytes": need, "free_bytes": free, "parts": parts, "largest_batch": fits}
    )
    wanted = {n for n, _ in model.named_parameters() if n != "lm_head.weight" or s.config.draft.train_lm_head}
    found = {n for n, p in model.named_parameters() if p.requires_grad}
    if wanted != found:
        text = f"trainable, but must be frozen: {sorted(found - wanted)}; the other way: {sorted(wanted - found)}"
        yield error(text, "see draft.train_lm_head")


def largest_batch(parts: dict[str, int], batch_tokens: int, free: int) -> int:
    """Tokens of a micro-batch that fill four fifths of the memory (activations grow with it, the rest does not): a
    multiple of 64; 0 where none fits."""
    fixed = sum(size for name, size in parts.items() if name != "activations")
    room = 0.8 * free - fixed
    return max(0, int(room / parts["activations"] * batch_tokens) // 64 * 64)


def fresh_weights_are_sound(s: Subject) -> Iterator[Finding]:
    """What training starts from, the target's parts included: nothing is left as memory was."""
    draft, again = s.trial, "fetch the target again"
    parts = {**dict(draft.named_parameters()), **dict(draft.named_buffers())}
    for name, tensor in parts.items():
        if tensor.is_floating_point() and (bad := int((~tensor.isfinite()).sum())):
            yield error(f"{name} {list(tensor.shape)} has {bad} values that are NaN or infinite", again)
        elif name in SPEAKING and not tensor.any():
            yield error(f"{name} {list(tensor.shape)} is all zero", again)
    head = "trained" if s.config.draft.train_lm_head else "frozen"
    yield info(f"{len(parts)} tensors of the fresh draft are finite; lm_head is {head}")


def memory_parts(
    c: Eagle3DraftConfig, train: TrainConfig, trained: int, share: float, device: str
) -> dict[str, int]:
    """Bytes at the peak of training, by what they are for. `share`: part of the tokens that is supervised."""
    half = train.dtype == "bfloat16" or (train.dtype == "auto" and device == "cuda")
    rows, width, heads = train.batch_tokens, 2 if half else 4, c.num_attention_heads + c.num_key_value_heads
    kept = min(rows, int(rows * share) + train.ttt_steps)  # rows that a loss hangs on
    # What backward needs: of each row the aux states, embedding, step-0 keys and values; of each kept row and TTT
    # step the inputs of every product and norm.
    once = (c.num_aux + 4) * c.hidden_size + 2 * heads * c.head_dim
    per_step = 10 * c.hidden_size + 4 * heads * c.head_dim + 4 * c.intermediate_size
    frozen = (c.vocab_size + c.draft_vocab_size * (1 if c.train_lm_head else 2)) * c.hidden_size
    activations = width * (rows * once + kept * per_step * train.ttt_steps)
    parts = {"weights": trained * (6 if half else 4), "gradients": trained * 4, "optimizer": trained * 8}
    return parts | {"frozen": frozen * width, "activations": activations}


def available_memory(device: str, root: Path = Path("/")) -> int:
    """Free bytes of the GPU; or of the host, where a container's limit counts as well as what the machine has."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0]
    if not (root / "proc/meminfo").is_file():  # macOS says only how much there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    rooms = [int(lines["MemAvailable"].split()[0]) * 1024]
    mount, listed = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    groups = listed.read_text().splitlines() if listed.is_file() else []
    own = mount / next((g[3:].lstrip("/") for g in groups if g.startswith("0::")), "")
    limits = [(g, "memory.max", "memory.current") for g in (own, *own.parents)]  # version 2: all above count too
    for folder, most, now in [*limits, (mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")]:
        if (folder / most).is_file() and (limit := (folder / most).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("total_inactive_file", stat["inactive_file"]))  # given up when memory is short
            rooms.append(int(limit) - int((folder / now).read_text()) + cached)
    return min(rooms)


CHECKS = [
    Check("memory", "model", ("store", "tables"), draft_builds_and_fits),
    Check("fresh", "model", ("memory",), fresh_weights_are_sound),
]
