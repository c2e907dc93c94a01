"""Which samples make up each micro-batch, and their tensors: packed rows without padding.

The order is a function of (seed, epoch) alone, so the number of optimiser steps done is the whole data position.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from eyas.draft import TrainBatch
from eyas.features.contract import Features
from eyas.kernels.send import send

WINDOW = 16  # optimiser steps levelled together: wide enough to fill batches, narrow enough to keep them random


def plan_epoch(lengths: np.ndarray, budget: int, seed: int, epoch: int, group: int = 1) -> list[np.ndarray]:
    """Micro-batches of one epoch, each an ascending array of sample indices; lengths [S] in tokens.

    The samples are shuffled, cut into windows, and each window is levelled: longest first into the emptiest
    micro-batch, so all hold nearly the same number of tokens and none more than `budget`, at which longer samples
    are cut. Their number is a multiple of `group`, the micro-batches of one optimiser step, wherever there are
    samples enough.
    """
    size = np.minimum(lengths, budget)
    total = int(size.sum())
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(size))
    steps = -(-total // (budget * group))
    marks = np.linspace(0, steps, max(1, round(steps / WINDOW)) + 1).round()  # windows end at these steps
    edges = np.searchsorted(np.cumsum(size[order]), marks[1:-1] / steps * total)
    batches: list[np.ndarray] = []
    for part, share in zip(np.split(order, edges), np.diff(marks), strict=True):
        count = min(int(share) * group, len(part))
        while (bins := _level(part, size, count, budget)) is None:
            count = min(count + group, len(part))
        batches += [np.sort(bins[i]) for i in rng.permutation(count)]
    return batches


def _level(part: np.ndarray, size: np.ndarray, count: int, budget: int) -> list[list[int]] | None:
    """`count` bins of nearly equal size, or None when one would exceed the budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in part[np.argsort(-size[part], kind="stable")]:
        load, b = heap[0]
        load += int(size[i])
        if load > budget:
            return None
        heapq.heapreplace(heap, (load, b))
        bins[b].append(int(i))
    return bins


class StepPlan(NamedTuple):
    epoch: int
    batches: list[np.ndarray]  # sample indices of each micro-batch
    ends_epoch: bool
    tokens: int


def plan_steps(
    lengths: np.ndarray, budget: int, group: int, seed: int, epochs: int, max_steps: int | None = None
) -> list[StepPlan]:
    """Every optimiser step: `epochs` passes, or exactly `max_steps` steps through as many passes as that takes."""
    steps: list[StepPlan] = []
    size, epoch = np.minimum(lengths, budget), 0
    while len(steps) < max_steps if max_steps else epoch < epochs:
        batches = plan_epoch(lengths, budget, seed, epoch, group)
        for i in range(0, len(batches), group):
            mine = batches[i : i + group]
            steps.append(StepPlan(epoch, mine, i + group >= len(batches), int(size[np.concatenate(mine)].sum())))
        epoch += 1
    return steps[:max_steps]


def pack(samples: Iterable[Features], budget: int) -> TrainBatch:
    """Join samples into shifted rows: row t of a sample holds token t+1, aux states t, and the target of t+1.
    T tokens give T-1 rows; those after the first `budget` are cut off. The tensors own their memory."""
    parts = []
    for f in samples:
        end = min(len(f.token_ids), budget)
        mask = f.loss_mask[1:end]
        skip = int(f.loss_mask[0])  # token 0 is nobody's row, so its target state is nobody's target
        targets = f.last_hidden_state[skip : skip + int(mask.sum())]
        parts.append((f.token_ids[1:end], f.aux_hidden_states[: end - 1].flatten(1), targets, mask))
    count = torch.tensor([len(mask) for *_, mask in parts])
    end = count.cumsum(0)
    first, last = (end - count).repeat_interleave(count), end.repeat_interleave(count)
    ids, aux, targets, supervised = map(torch.cat, zip(*parts, strict=True))
    return TrainBatch(ids, aux, targets, supervised, first, last)


def move(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """What is computed with goes to the device; what the row plan was made from stays."""
    if device.type == "cpu":
        return batch
    fields = ("input_ids", "aux", "targets")
    moved = {f: send(getattr(batch, f), device) for f in fields}
    return batch._replace(**moved, plan=batch.plan and batch.plan.to(device))


def prefetch(
    load: Callable[[Any], list[TrainBatch]], items: Sequence[Any], device: torch.device
) -> Iterator[tuple[Any, list[TrainBatch], float]]:
    """(item, load(item) on the device, seconds waited for it) of each, in order.

    Threads load the next items while the caller uses this one. To a GPU they go from pinned memory on a stream of
    their own, so that copying overlaps with computing too.
    """
    gpu = device.type == "cuda"
    workers, stream = (4, torch.cuda.Stream(device)) if gpu else (1, None)

    def work(item: Any) -> tuple[list[TrainBatch], Any]:
        with torch.cuda.stream(stream):  # None: no stream of a GPU is chosen
            batches = [move(b, device) for b in load(item)]
            return batches, stream.record_event() if stream else None

    with ThreadPoolExecutor(workers) as pool:
        ahead = deque(pool.submit(work, item) for item in items[:workers])
        for i, item in enumerate(items):
            started = time.perf_counter()
            batches, copied = ahead.popleft().result()
            waited = time.perf_counter() - started
            ahead.extend(pool.submit(work, following) for following in items[i + workers : i + workers + 1])
            if copied:
                now = torch.cuda.current_stream(device)
                now.wait_event(copied)
                for b in batches:
                    for tensor in (b.input_ids, b.aux, b.targets, b.plan and b.plan.positions):
                        if tensor is not None:
                            tensor.record_stream(now)  # else its memory could be given away while in use
            yield item, batches, waited
