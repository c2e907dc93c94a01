"""Training in one process or, under torchrun, in several: the few things that ranks tell each other.

Every rank holds the whole draft and takes its share of each optimiser step's micro-batches; gradients and counts
are summed. With one process all of this does nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def wanted() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start() -> None:
    """Join the others: NCCL with a GPU for each rank of a host, gloo without GPUs."""
    if wanted() > 1 and not dist.is_initialized():
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Rank 0 checks the run before training while the others wait, longer than the usual half hour if need be.
        dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(hours=2))


@contextmanager
def alone() -> Iterator[None]:
    """In here this rank computes for itself, as one process would, while the others wait: nothing is summed."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


_alone = False


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() and not _alone else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() and not _alone else 1


def total(x: Tensor) -> Tensor:
    """The sum of all ranks' x, on every rank."""
    if size() == 1:
        return x
    there = x.cuda() if dist.get_backend() == "nccl" else x.cpu().clone()
    dist.all_reduce(there)
    return there.to(x.device)


def total_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum every gradient over the ranks; one that had no micro-batch counts as zero."""
    if size() == 1:
        return
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    for work in [dist.all_reduce(p.grad, async_op=True) for p in parameters]:
        if work is not None:  # it is None only for a rank outside the group
            work.wait()


def tell(value: Any = None) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    if size() > 1:
        dist.broadcast_object_list(box)
    return box[0]
