"""Features: are the states those of the layers they are said to be of? A few tokens are run through the target.

Each stored layer is compared with the target's states at every boundary: which it is closest to is what it is. So
layers that were swapped, counted by another convention, shifted or permuted are told by what they really are.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.config import RunConfig
from eyas.errors import EyasError
from eyas.features.contract import POST_NORM, PRE_NORM, Features
from eyas.features.store import Store
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.preflight.model import available_memory
from eyas.target.backend import Target

SAMPLES, TOKENS, FAR = 2, 48, 1024  # TOKENS up to some supervised ones, at most FAR into a sample
LARGEST = 4 << 30  # bytes of weights that are loaded for a look
# Relative differences. In a model of 30 layers, bfloat16 against float32 made at most 0.016, neighbouring layers
# at least 0.22.
NEAR, ROUNDING = 0.2, 0.05
HINT = "extract again; if another tool wrote these states, give the layers it really captured"


def layers_are_the_targets(s: Subject) -> Iterator[Finding]:
    if reason := too_large(s):
        yield info(f"not recomputed, the layers are taken as they are said to be: {reason}")
        return
    chosen = [head_of(f) for f in sorted(s.samples, key=lambda f: int(f.loss_mask.int().argmax()))[:SAMPLES]]
    try:
        found = capture(s, [f.token_ids.tolist() for f in chosen])  # [T, L + 1, H]
    except EyasError as e:
        yield info(f"not recomputed, the layers are taken as they are said to be: {e.message}", e.hint)
        return
    aux = torch.cat([f.aux_hidden_states for f in chosen]).float()  # [T, A, H]
    placed = [place(states, found) for states in aux.unbind(1)]
    normed = torch.cat([found, s.weights.final_norm().float()(found[:, -1:])], 1)
    last = torch.cat([f.last_hidden_state for f in chosen]).float()
    at = place(last, normed[torch.cat([f.loss_mask for f in chosen])]) if len(last) > 2 else None
    count, boundaries = s.spec.num_layers, [b for b, _, _ in placed]
    evidence = {"boundaries": boundaries, "differences": [round(e, 4) for _, e, _ in placed], "tokens": len(aux)}
    evidence |= {"last": None if at is None else at[0], "last_difference": None if at is None else round(at[1], 4)}
    all_placed = {f"aux column {c}": p for c, p in enumerate(placed)} | (
        {"the last hidden state": at} if at else {}
    )
    strange = [(name, *p) for name, p in all_placed.items() if p[1] > NEAR or p[2]]
    s.recomputed = not strange
    for name, boundary, apart, how in strange:
        what = f"boundary {boundary}" if boundary <= count else "the final norm"
        if how:
            yield error(f"{name} is {what}'s, but {how}", HINT, evidence)
        else:
            text = f"{name}: closest is {what}, which differs by {apart:.0%}"
            yield error(f"{text}: states of other tokens, another revision or another target", HINT, evidence)
    if strange:
        return
    if (most := max(e for _, e, _ in all_placed.values())) > ROUNDING:
        text = f"the stored states differ from the target's own by {most:.0%}, more than rounding does"
        hint = "another revision, a quantised engine, or another attention implementation made them"
        yield warning(text, hint, evidence)
    declared = s.features.meta if isinstance(s.features, Store) else None
    here = None if at is None else {count: PRE_NORM, count + 1: POST_NORM}.get(at[0], f"boundary {at[0]}")
    if declared is None:
        outputs = [b - 1 for b in boundaries]
        text = f"recomputed: the aux states are of boundaries {boundaries} (outputs of blocks {outputs})"
        yield info(f"{text}, the last one is {here}", "", evidence)
        if here and here.startswith("boundary"):
            text = f"the last hidden state is {here}'s, the target's own last one is boundary {count}'s"
            yield error(text, f"capture boundary {count} too, and store it last", evidence)
        elif boundaries != sorted(boundaries):
            text = f"the aux layers are stored in the order {boundaries}, servers give them ascending"
            yield error(text, "put them in order before training")
        return
    if boundaries != (said := list(declared.aux_layers)):
        yield error(misplaced(said, boundaries), HINT, evidence)
    if here not in (None, declared.last_hidden_state):
        yield error(f"the last hidden state is {here}, declared is {declared.last_hidden_state}", HINT, evidence)
    if boundaries == said and here in (None, declared.last_hidden_state):
        what = f"boundaries {boundaries}{' and the last state' * (at is not None)}"
        text = f"recomputed {len(aux)} tokens: {what} are the target's own"
        yield info(f"{text} (largest difference {most:.1%})", evidence=evidence)


def head_of(f: Features) -> Features:
    """The sample up to some TOKENS supervised tokens: a causal target gives its rows the same states alone."""
    end = min(int(f.loss_mask.int().argmax()) + TOKENS, FAR)
    last = f.last_hidden_state[: int(f.loss_mask[:end].sum())]
    return Features(f.id, f.token_ids[:end], f.loss_mask[:end], f.aux_hidden_states[:end], last)


def misplaced(said: list[int], found: list[int]) -> str:
    by = {b - a for a, b in zip(said, found, strict=True)}
    text = f"aux layers are declared {said}, but hold boundaries {found}"
    if sorted(found) == sorted(said):
        return f"{text}: stored in another order"
    if len(by) == 1:
        side = "later: they were counted as outputs of blocks" if by == {1} else f"off by {next(iter(by))}"
        return f"{text}: every one is one block {side}" if by == {1} else f"{text}: all are {side}"
    return text


def too_large(s: Subject) -> str:
    size = sum(f.stat().st_size for f in s.weights.shards.files)
    device = (s.given_config or RunConfig()).torch_device()
    most = min(LARGEST, available_memory(device) // 3)
    text = f"the target has {size / 1e9:,.1f} GB of weights, at most {most / 1e9:.1f} are loaded for this"
    return text if size > most else ""


@torch.no_grad()
def capture(s: Subject, batch: list[list[int]]) -> Tensor:
    """States [T, L + 1, H] of the samples' tokens at every boundary, the one before the final norm included."""
    config = s.given_config or RunConfig()
    how = config.target
    target = Target.load(s.spec, how.dtype, config.torch_device(), how.attention, how.trust_remote_code)
    states = torch.cat([c.aux for c in target.capture(batch, list(range(s.spec.num_layers + 1)))])
    del target
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # or its memory would count as taken in the checks to come
    return states.float()


def place(stored: Tensor, found: Tensor) -> tuple[int, float, str]:
    """(boundary, difference, how they are displaced) for stored [T, H] among found [T, B, H]."""
    best, apart = nearest(stored, found)
    if apart < NEAR:
        return best, apart, ""
    for by, whose in ((1, "p-1"), (-1, "p+1")):
        a, b = (stored[1:], found[:-1]) if by == 1 else (stored[:-1], found[1:])
        where, off = nearest(a, b)
        if off < NEAR:
            return where, off, f"shifted by one: row p holds token {whose}'s state"
    for parts in (2, 4, 8):
        if stored.shape[1] % parts == 0 and (order := chunk_order(stored, found, parts)):
            where, off, mixed = order
            return where, off, f"its {parts} parts are in the order {mixed}, as tensor-parallel ranks mix them"
    return best, apart, ""


def nearest(stored: Tensor, found: Tensor) -> tuple[int, float]:
    """The boundary of least difference, the median over rows of |a - b| / |b|: one huge token cannot decide."""
    apart = (stored[:, None] - found).norm(dim=-1) / found.norm(dim=-1).clamp(min=1e-6)  # [T, B]
    middle = apart.median(0).values
    best = int(middle.argmin())
    return best, float(middle[best])


def chunk_order(stored: Tensor, found: Tensor, parts: int) -> tuple[int, float, list[int]] | None:
    """(boundary, difference, where each stored part belongs) when permuting equal parts of the channels helps."""
    a, b = stored.unflatten(1, (parts, -1)), found.unflatten(2, (parts, -1))  # [T, p, h], [T, B, p, h]
    for boundary in range(found.shape[1]):
        whole = b[:, boundary, None]  # [T, 1, p, h]
        apart = (a[:, :, None] - whole).norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-6)  # [T, p, p]
        least, order = apart.median(0).values.min(1)  # [p]
        if float(least.max()) < NEAR and len({*order.tolist()}) == parts:
            return boundary, float(least.max()), order.tolist()
    return None


CHECKS = [Check("recomputed", "features", ("contract",), layers_are_the_targets, "features")]
