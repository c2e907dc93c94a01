"""Which rows a training pass must compute: exact row compaction.

Rows are shifted (row r: token x[t+1], aux a[t], target state y[t+1], mask m[t+1], position t). At step k row r
sees token r + k and is compared with the target of row r + k. Other rows see it only through its step-0 key and
value, so a row counted neither at step k nor later need not be computed at step k: same loss, same gradients.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.draft.config import DraftShapeError
from eyas.kernels.send import send
from eyas.kernels.ttt_attention import Visible, visible


class TrainBatch(NamedTuple):
    """Documents packed one after the other, N shifted rows in all. The row plan is made on the CPU, where
    `supervised`, `doc_start` and `doc_end` belong; the rest is on the model's device."""

    input_ids: Tensor  # [N] int64 or int32
    aux: Tensor  # [N, A * H], aux states side by side, lowest layer first
    targets: Tensor  # [M, H] last hidden states before the final norm, one for each supervised row
    supervised: Tensor  # [N] bool, M of them true
    doc_start: Tensor  # [N] int64, first row of the row's document
    doc_end: Tensor  # [N] int64, one past its last row
    positions: Tensor | None = None  # [N] int64 on the CPU; default: the row's place in its document
    plan: "RowPlan | None" = None  # of this batch and the run's K, when it has been made ahead


SHRINK = 1 / 32  # rows leave when at least this share can: moving the others costs more than a few idle ones


class StepRows(NamedTuple):
    """The rows of one step, in ascending order: all that are counted at it or later, and maybe a few more."""

    kept: Tensor  # [A_k] their places among the rows of the step before (step 0: among all rows)
    tokens: Tensor  # [A_k] rows + k: whose token they embed, below N + K
    queries: Tensor  # [A_k] the places of `tokens` in RowPlan.query_tokens
    positions: Tensor  # [A_k] RoPE positions
    seen: Visible  # the rows themselves, and the keys they see


@dataclass(frozen=True)
class RowPlan:
    """Indices of everything a pass computes, int64, made on the CPU.

    The losses of all steps are one list of R entries in the order of their targets, so that each target's
    distribution is made once: entry i compares row loss_rows[i] of all steps' rows together with its target.
    """

    steps: list[StepRows]
    query_tokens: Tensor  # [U] tokens whose embedding is needed in a query
    positions: Tensor  # [N]
    last_position: int
    loss_rows: Tensor  # [R]
    loss_targets: Tensor  # [R] stays on the CPU
    loss_cells: Tensor  # [R] step * N + row
    counts: Tensor  # [K] on the CPU, rows counted at each step

    def to(self, device: torch.device) -> "RowPlan":
        """The same with its indices on the device, in one transfer."""
        if self.positions.device == device:
            return self
        own = [self.query_tokens, self.positions, self.loss_rows, self.loss_cells]
        parts = [
            *own,
            *(x for step in self.steps for x in (*step[:4], *step.seen[:2], step.seen.ranges.flatten())),
        ]
        moved = send(torch.cat(parts), device).split([len(x) for x in parts])
        query_tokens, positions, loss_rows, loss_cells, *rest = moved
        steps = []
        for step in self.steps:
            kept, tokens, queries, places, rows, starts, ranges, *rest = rest
            seen = Visible(rows, starts, ranges.view(-1, 4), step.seen.blocks)
            steps.append(StepRows(kept, tokens, queries, places, seen))
        kept = {"last_position": self.last_position, "loss_targets": self.loss_targets, "counts": self.counts}
        return RowPlan(steps, query_tokens, positions, loss_rows=loss_rows, loss_cells=loss_cells, **kept)


def counted_rows(supervised: Tensor, doc_end: Tensor, ttt_steps: int) -> Tensor:
    """[K, N] bool: row r is counted at step k when row r + k is supervised and of the same document."""
    n = supervised.shape[0]
    ahead = torch.arange(n) + torch.arange(ttt_steps)[:, None]  # [K, N]
    return (ahead < doc_end) & supervised[ahead.clamp(max=n - 1)]


def row_plan(batch: TrainBatch, ttt_steps: int) -> RowPlan:
    """The batch's plan, on the CPU. Raises DraftShapeError when the batch's sizes contradict each other."""
    supervised, doc_start, doc_end = batch.supervised.cpu(), batch.doc_start.cpu(), batch.doc_end.cpu()
    n = supervised.shape[0]
    if not (len(batch.input_ids) == len(batch.aux) == len(doc_start) == len(doc_end) == n > 0):
        found = {k: list(v.shape) for k, v in batch._asdict().items() if v is not None}
        raise DraftShapeError(f"a batch needs as many rows in each tensor, and at least one; found {found}")
    if len(batch.targets) != (m := int(supervised.sum())):
        raise DraftShapeError(f"{len(batch.targets)} targets for {m} supervised rows; expected one for each")

    counted = counted_rows(supervised, doc_end, ttt_steps)
    alive = counted.flip(0).cummax(0).values.flip(0)  # counted at this step or a later one
    positions = torch.arange(n) - doc_start if batch.positions is None else batch.positions.cpu()
    last = int(positions.max()) + ttt_steps
    rows = [alive[0].nonzero()[:, 0]]
    for a in alive[1:]:
        fewer = int(a.sum()) <= (1 - SHRINK) * len(rows[-1])
        rows.append(a.nonzero()[:, 0] if fewer else rows[-1])
    needed = torch.zeros(n + ttt_steps, dtype=torch.bool)
    for k, r in enumerate(rows):
        needed[r + k] = True
    place, target = needed.cumsum(0) - 1, supervised.cumsum(0) - 1

    steps, entries, offset = [], [], 0
    before = torch.ones(n, dtype=torch.bool)
    for k, r in enumerate(rows):
        kept = (before.cumsum(0) - 1)[r]
        seen = visible(r, doc_start[r], n)
        steps.append(StepRows(kept, r + k, place[r + k], positions[r] + k, seen))
        local = counted[k][r].nonzero()[:, 0]
        entries.append(torch.stack([target[r[local] + k], offset + local, k * n + r[local]]))
        offset, before = offset + len(r), torch.zeros(n, dtype=torch.bool).index_fill_(0, r, True)
    entry = torch.cat(entries, 1)
    entry = entry[:, entry[0].argsort(stable=True)]
    tokens = needed.nonzero()[:, 0]
    return RowPlan(steps, tokens, positions, last, entry[1], entry[0], entry[2], counted.sum(1))
