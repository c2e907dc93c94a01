"""Triton kernels of `linear_kl`: a program turns a row of logits into statistics and, in place, its gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CELLS = 1 << 26  # logits of a chunk: rows enough to fill the GPU, and an eighth of a GB in a half type


@triton.jit
def _target_rows(Z, LSE, MEAN, BEST, vocab, BLOCK: tl.constexpr):
    """Log-sum-exp, expectation and arg-max of the logits of one target row."""
    row = tl.program_id(0).to(tl.int64)
    Z += row * vocab
    top, total, weighted, best = float("-inf"), 0.0, 0.0, 0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(Z + at, at < vocab, other=float("-inf")).to(tl.float32)
        most = tl.max(z, 0)
        best = tl.where(most > top, first + tl.argmax(z, 0), best)
        new = tl.maximum(top, most)
        shrink, e = tl.exp(top - new), tl.exp(z - new)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(at < vocab, e * z, 0.0), 0)
        top = new
    tl.store(LSE + row, top + tl.log(total))
    tl.store(MEAN + row, weighted / total)
    tl.store(BEST + row, best)


@triton.jit
def _draft_rows(
    Z, TARGET_Z, LOCAL, LSE, MEAN, BEST, SCALE, KL, OVERLAP, TOKEN, HIT, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """Statistics of one draft row against its target; the logits become scale * (q - p)."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(LOCAL + row)
    Z += row * vocab
    TARGET_Z += target * vocab
    top, total, best = float("-inf"), 0.0, 0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(Z + at, at < vocab, other=float("-inf")).to(tl.float32)
        most = tl.max(z, 0)
        best = tl.where(most > top, first + tl.argmax(z, 0), best)
        new = tl.maximum(top, most)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), 0)
        top = new
    lse, target_lse, scale = top + tl.log(total), tl.load(LSE + target), tl.load(SCALE + row)
    overlap, cross = 0.0, 0.0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(Z + at, at < vocab, other=float("-inf")).to(tl.float32)
        y = tl.load(TARGET_Z + at, at < vocab, other=float("-inf")).to(tl.float32)
        q, p = tl.exp(z - lse), tl.exp(y - target_lse)
        cross += tl.sum(tl.where(at < vocab, p * (y - z), 0.0), 0)
        overlap += tl.sum(tl.minimum(p, q), 0)
        tl.store(Z + at, ((q - p) * scale).to(Z.dtype.element_ty), at < vocab)
    tl.store(KL + row, cross + lse - target_lse)  # sum p ((y - target_lse) - (z - lse))
    tl.store(OVERLAP + row, overlap)
    tl.store(TOKEN + row, best.to(tl.int64))
    tl.store(HIT + row, best == tl.load(BEST + target))


class GPUChunks:
    """As `_Chunks` on the CPU; logits are in x's dtype, all arithmetic on them in fp32."""

    def __init__(self, x: Tensor, vocab: int):
        self.size = max(1, min(len(x), CELLS // vocab))
        self.logits, self.target_logits = (x.new_empty(self.size, vocab) for _ in range(2))
        self.stats = [x.new_empty(self.size, dtype=t) for t in (torch.float32, torch.float32, torch.int64)]

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        target_x: Tensor,
        target_weight: Tensor,
        local: Tensor,
        scale: Tensor,
        stats: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> Tensor:
        vocab, n = len(weight), len(x)
        meta = {"BLOCK": min(4096, triton.next_power_of_2(vocab)), "num_warps": 8}
        y, z = self.target_logits[: len(target_x)], self.logits[:n]
        torch.mm(target_x, target_weight.T, out=y)
        _target_rows[(len(y),)](y, *self.stats, vocab, **meta)
        torch.mm(x, weight.T, out=z)
        _draft_rows[(n,)](z, y, local, *self.stats, scale, *stats, vocab, **meta)
        return z
