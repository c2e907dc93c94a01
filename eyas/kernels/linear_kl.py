"""Linear layer + KL divergence against a target that is itself a linear layer, without keeping any logits.

Both logit matrices exist for one chunk of rows only; the gradient is formed in the forward pass, so backward is a
product with a scalar. A target row is softmaxed once, however many draft rows are compared with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.send import send


class RowStats(NamedTuple):
    """What each draft row [R] showed on the way, without gradient."""

    kl: Tensor  # KL(target || draft) in nats, fp32 or wider
    overlap: Tensor  # sum over the vocabulary of min(p, q): the chance that a sampled draft token is accepted
    token: Tensor  # the draft's arg-max, int64
    hit: Tensor  # bool: it equals the target's arg-max


def linear_kl(
    x: Tensor, weight: Tensor, target_x: Tensor, target_weight: Tensor, target_rows: Tensor, scale: Tensor
) -> tuple[Tensor, RowStats]:
    """sum_r scale[r] * KL(softmax(target_x[t_r] @ target_weight.T) || softmax(x[r] @ weight.T)), t = target_rows

    x [R, H], weight [Vd, H], target_x [M, H], target_weight [Vd, H] in one floating dtype (softmax and loss in
    fp32 at least); target_rows [R] int64 on the CPU, ascending; scale [R] fp32 or wider. Gradients flow to x and,
    when it asks for one, to weight; the target has none.
    """
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()
    loss, *stats = _LinearKL.apply(x, weight, target_x, target_weight, target_rows, scale)
    return loss, RowStats(*stats)


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target_x, target_weight, target_rows, scale):
        rows, vocab = x.shape[0], weight.shape[0]
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.is_cuda:
            from eyas.kernels.linear_kl_gpu import GPUChunks

            compare = GPUChunks(x, vocab)
        else:
            compare = _Chunks(x, vocab)
        rows_there = send(target_rows, x.device)
        kl, overlap = (x.new_empty(rows, dtype=wide) for _ in range(2))
        token, hit = x.new_empty(rows, dtype=torch.int64), x.new_empty(rows, dtype=torch.bool)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for start in range(0, rows, compare.size):
            part = slice(start, min(start + compare.size, rows))
            first, last = int(target_rows[start]), int(target_rows[part.stop - 1])
            targets = target_x[first : last + 1], target_weight, rows_there[part] - first
            stats = RowStats(kl[part], overlap[part], token[part], hit[part])
            grad = compare(x[part], weight, *targets, scale[part], stats)  # [n, Vd], of the logits
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, x[part])
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(kl, overlap, token, hit)
        return (kl * scale).sum(), kl, overlap, token, hit

    @staticmethod
    def backward(ctx, *grad_outputs):
        grads = (None if g is None else g * grad_outputs[0].to(g.dtype) for g in ctx.saved_tensors)
        return *grads, None, None, None, None


class _Chunks:
    """One chunk of rows at a time, small enough for a CPU's last-level cache; its buffers are used again."""

    def __init__(self, x: Tensor, vocab: int):
        self.size = max(1, min(len(x), (1 << 21) // vocab))
        wide = torch.promote_types(x.dtype, torch.float32)
        self.buffers = [x.new_empty(self.size, vocab, dtype=wide) for _ in range(4)]

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        target_x: Tensor,
        target_weight: Tensor,
        local: Tensor,
        scale: Tensor,
        stats: RowStats,
    ) -> Tensor:
        """Fill `stats`; return scale * dKL/dlogits [n, Vd] in x's dtype. local [n]: each row's row of target_x."""
        z, p, g, p_rows = (b[: len(t)] for b, t in zip(self.buffers, (target_x, target_x, x, x), strict=True))
        lse, best = _softmax(target_x, target_weight, z, p)
        entropy = lse - z.mul_(p).sum(-1)  # of each target row
        torch.index_select(p, 0, local, out=p_rows)  # [n, Vd]
        z = self.buffers[0][: len(x)]
        lse, token = _softmax(x, weight, z, g)
        stats.token.copy_(token)
        stats.hit.copy_(token == best[local])
        g -= p_rows
        stats.kl.copy_(lse - p_rows.mul_(z).sum(-1) - entropy[local])
        stats.overlap.copy_(1 - torch.abs(g, out=z).sum(-1) / 2)
        return g.mul_(scale[:, None]).to(x.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in total's dtype: fp32 or wider."""
    if a.is_cuda and a.dtype != total.dtype:  # the product of half types goes straight into the fp32 sum
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=1, alpha=1, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _softmax(x: Tensor, weight: Tensor, logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Fill logits and probs [n, Vd] with those of x [n, H]; return each row's log-sum-exp and arg-max."""
    if x.dtype == logits.dtype:
        torch.mm(x, weight.T, out=logits)
    else:
        logits.copy_(x @ weight.T)
    torch.softmax(logits, -1, out=probs)
    top, best = _max(logits)
    return top - probs.gather(1, best[:, None])[:, 0].log(), best


def _max(x: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """Row maxima and where they are: a maximum over blocks first, as arg-max over long rows is slow on a CPU."""
    if x.shape[1] % block:
        return x.max(-1)
    blocks = x.view(x.shape[0], -1, block)  # [n, Vd / 64, 64]
    top, where = blocks.amax(-1).max(-1)
    inside = blocks.gather(1, where[:, None, None].expand(-1, 1, block))[:, 0].argmax(-1)
    return top, where * block + inside
