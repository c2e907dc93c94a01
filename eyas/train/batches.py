"""Which samples make up each micro-batch, and their tensors: packed rows without padding.

The order is a function of (seed, epoch) alone, so the number of optimiser steps done is the whole data position.
"""

import heapq
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from eyas.draft.rows import TrainBatch
from eyas.errors import EyasError
from eyas.features.store import Store

WINDOW = 16  # optimiser steps levelled together: wide enough to fill batches, narrow enough to keep them random


def plan_epoch(lengths: np.ndarray, budget: int, seed: int, epoch: int, group: int = 1) -> list[np.ndarray]:
    """Micro-batches of one epoch, each an ascending array of sample indices.

    The samples are shuffled, cut into windows, and each window is levelled: longest first into the emptiest
    micro-batch, so all hold nearly the same number of tokens and none more than `budget`.

    Args:
        lengths: [S] tokens of each sample; a sample longer than `budget` counts as `budget` (it is cut at its end).
        budget: largest number of tokens in one micro-batch.
        group: micro-batches of one optimiser step (over all ranks). The number of micro-batches is a multiple of it
            wherever there are samples enough, so that every step is a full one.
    """
    size = np.minimum(lengths, budget)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(size))
    filled = np.cumsum(size[order])
    windows = max(1, round(int(size.sum()) / (WINDOW * group * budget)))
    edges = np.searchsorted(filled, [size.sum() * w / windows for w in range(1, windows)])
    batches: list[np.ndarray] = []
    for part in np.split(order, edges):
        if not len(part):
            continue
        count = -(-int(size[part].sum()) // budget)
        count = min(-(-count // group) * group, len(part))
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
