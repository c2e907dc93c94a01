"""Attention of the TTT steps: documents' step-0 keys, and each row's own keys of the later steps.

Scores exist for one block of queries of one document only and are made again in backward, so nothing of the size
tokens x tokens is kept. Step-0 attention returns its log-sum-exp; the own keys are merged through it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

QUERY_BLOCK = 256  # CPU: queries of one document whose scores exist at a time
KEY_BLOCK = 64  # GPU: step-0 keys whose gradient one program makes

Block = tuple[int, int, int, int]
"""Queries first, last + 1 and keys first, last + 1 of one product; all keys are of the queries' document."""


class Visible(NamedTuple):
    """The step-0 keys that A queries see, starts[a] to rows[a], both ascending; and how the work is cut."""

    rows: Tensor  # [A] int64 on the queries' device
    starts: Tensor  # [A] int64
    # [ceil(N / KEY_BLOCK), 4] int64: queries [0]..[3] see keys of a block, [1]..[2] of them all of its keys
    ranges: Tensor
    blocks: list[Block]  # all queries in order


def visible(rows: Tensor, starts: Tensor, keys: int) -> Visible:
    """rows, starts [A] int64 on the CPU; keys: N. A document's rows have one start."""
    first_key = torch.arange(0, keys, KEY_BLOCK)  # of each block
    begin = torch.searchsorted(rows, first_key)
    end = torch.searchsorted(starts, first_key + KEY_BLOCK).maximum(begin)
    whole = torch.searchsorted(rows, first_key + KEY_BLOCK - 1).clamp(begin, end)
    part = torch.searchsorted(starts, first_key, right=True).clamp(whole, end)
    ranges = torch.stack([begin, whole, part, end], 1)
    blocks, first = [], 0
    for length in starts.unique_consecutive(return_counts=True)[1].tolist():
        for start in range(first, first + length, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, first + length)
            blocks.append((start, stop, int(starts[start]), int(rows[stop - 1]) + 1))
        first += length
    return Visible(rows, starts, ranges, blocks)


def ttt_attention(q: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor, seen: Visible) -> Tensor:
    """q [A, nh, d] -> [A, nh, d]; query a sees step-0 keys seen.starts[a] to seen.rows[a], and its own k keys.

    keys, values [N, nkv, d]; own_k, own_v [A, nkv, k, d], k >= 0. RoPE is already applied. Softmax in fp32 at
    least, scale d ** -0.5.
    """
    if q.is_cuda:
        from eyas.kernels.ttt_attention_gpu import TTTAttention

        return TTTAttention.apply(q, keys, values, own_k, own_v, *seen[:3], KEY_BLOCK)
    q = q * q.shape[-1] ** -0.5
    out, lse = _DocumentAttention.apply(q, keys, values, seen.rows, seen.blocks)  # [A, nh, d], [A, nh]
    if not own_k.shape[2]:
        return out
    heads, (a, nkv, _, d) = q.shape[1], own_k.shape
    group = (a, nkv, heads // nkv, d)
    own = q.view(group) @ own_k.transpose(-1, -2)  # [A, nkv, G, k]
    share = torch.cat([lse.view(group[:3])[..., None], own.to(lse.dtype)], -1).softmax(-1).to(q.dtype)
    merged = share[..., :1] * out.view(group) + share[..., 1:] @ own_v  # [A, nkv, G, d]
    return merged.view(q.shape)


class _DocumentAttention(torch.autograd.Function):
    """Attention over step-0 keys alone -> (out [A, nh, d], log-sum-exp of the scores [A, nh])."""

    @staticmethod
    def forward(ctx, q, keys, values, rows, blocks):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for block in blocks:
            scores, _, v = _scores(q, keys, values, rows, block)
            probs, queries, n = scores.softmax(-1), slice(*block[:2]), block[1] - block[0]
            out[queries] = _rows_first(probs.to(q.dtype) @ v, n)
            # the largest probability is exp(largest score - lse)
            lse[queries] = _rows_first((scores.amax(-1) - probs.amax(-1).log())[..., None], n)[..., 0]
        ctx.save_for_backward(q, keys, values, rows, out)
        ctx.blocks = blocks
        return out, lse

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad_out, grad_lse = grad_outputs
        q, keys, values, rows, out = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        # d loss / d score = prob * (grad_out . value - grad_out . out + grad_lse)
        offset = (grad_out * out).to(grad_lse.dtype).sum(-1) - grad_lse  # [A, nh]
        nkv = keys.shape[1]
        for block in ctx.blocks:
            queries, cells = slice(*block[:2]), slice(*block[2:])
            scores, k, v = _scores(q, keys, values, rows, block)
            qb, gb = _heads_first(q[queries], nkv), _heads_first(grad_out[queries], nkv)  # [nkv, n * G, d]
            probs = scores.softmax(-1)
            grad_v[cells] += (probs.to(q.dtype).transpose(1, 2) @ gb).transpose(0, 1)
            grad_s = (gb @ v.transpose(1, 2)).sub_(_heads_first(offset[queries][..., None], nkv)).mul_(probs)
            grad_q[queries] = _rows_first(grad_s @ k, block[1] - block[0])
            grad_k[cells] += (grad_s.transpose(1, 2) @ qb).transpose(0, 1)
        return grad_q, grad_k, grad_v, None, None


def _scores(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Masked scores [nkv, n * G, T] of a block, with its keys and values [nkv, T, d]."""
    queries, cells = slice(*block[:2]), slice(*block[2:])
    k, v = keys[cells].transpose(0, 1), values[cells].transpose(0, 1)
    scores = _heads_first(q[queries], len(k)) @ k.transpose(1, 2)
    visible = torch.arange(*block[2:], device=q.device) <= rows[queries, None, None]  # [n, 1, T]
    scores.unflatten(1, (len(visible), -1)).add_(torch.where(visible, 0.0, float("-inf")))
    return scores.to(torch.promote_types(q.dtype, torch.float32)), k, v


def _heads_first(x: Tensor, nkv: int) -> Tensor:
    """[n, nh, c] -> [nkv, n * G, c]"""
    n, heads, c = x.shape
    return x.view(n, nkv, heads // nkv, c).transpose(0, 1).reshape(nkv, -1, c)


def _rows_first(x: Tensor, n: int) -> Tensor:
    """[nkv, n * G, c] -> [n, nh, c]"""
    return x.view(x.shape[0], n, -1, x.shape[2]).transpose(0, 1).reshape(n, -1, x.shape[2])
