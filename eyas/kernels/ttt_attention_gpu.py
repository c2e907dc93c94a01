"""Triton kernels of `ttt_attention`: the plain version's numbers, nothing of the size queries x keys in memory.

A program takes a block of queries of one head over exactly the keys that the block can see, then their own keys.
Backward makes the scores again from the log-sum-exp (in base 2) that forward has kept: FlashAttention-2 (Dao,
2023) with rows that were left out and one diagonal key for each step.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
# Of heads up to 128 wide, and beyond: fastest of some twenty on an H200
FORWARD = (
    {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
    {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 2},
)
QUERIES = (
    {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 3},
    {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 2},
)
KEYS = ({"BM": 64, "num_warps": 4, "num_stages": 1}, {"BM": 32, "num_warps": 8, "num_stages": 2})


@triton.jit
def _window(row, start, live, BN: tl.constexpr):
    """First key that a block of queries sees, end of the keys that all of them see, end of those that any sees.

    The first two are equal where the block holds queries of two documents.
    """
    first, end = tl.min(start), tl.max(row) + 1
    shared = tl.min(tl.where(live, row, 0x7FFFFFFF)) + 1 - tl.max(tl.where(live, start, 0))
    one_document = tl.max(tl.where(live, start, 0)) == first
    return first, tl.where(one_document & (shared > 0), first + shared // BN * BN, first), end


@triton.jit
def _tile(X, n, kv, nkv, d, end, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [BN, DP] of one head."""
    at = (n[:, None].to(tl.int64) * nkv + kv) * D + d
    if MASKED:
        return tl.load(X + at, (n < end)[:, None] & (d < D), other=0.0)
    if D == DP:
        return tl.load(X + at)
    return tl.load(X + at, (d < D)[None, :], other=0.0)


@triton.jit
def _attend(
    acc, top, total, q, K, V, row, start, begin, end, scale, kv, nkv, d,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One pass of online softmax over keys begin ... end."""
    for first in range(begin, end, BN):
        n = first + tl.arange(0, BN)
        k = _tile(K, n, kv, nkv, d, end, D, DP, MASKED)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where((n <= row[:, None]) & (n >= start[:, None]), scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
        p, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        v = _tile(V, n, kv, nkv, d, end, D, DP, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top, total = new, total * shrink + tl.sum(p, 1)
    return acc, top, total


@triton.jit(do_not_specialize=["queries", "own"])
def _forward(
    Q, K, V, OWN_K, OWN_V, ROWS, STARTS, OUT, LSE, scale, queries, own,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    kv, nkv = head // GROUP, HEADS // GROUP
    a, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, DP)
    live = a < queries
    row = tl.load(ROWS + a, live, other=-1).to(tl.int32)
    start = tl.load(STARTS + a, live, other=0x7FFFFFFF).to(tl.int32)
    first, shared, end = _window(row, start, live, BN)
    at_q = (a[:, None].to(tl.int64) * HEADS + head) * D + d
    tile = live[:, None] & (d < D)
    q = tl.load(Q + at_q, tile, other=0.0)
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    acc, top, total = _attend(
        acc, top, total, q, K, V, row, start, first, shared, scale, kv, nkv, d, D, DP, BN, False, PRECISION
    )
    acc, top, total = _attend(
        acc, top, total, q, K, V, row, start, shared, end, scale, kv, nkv, d, D, DP, BN, True, PRECISION
    )
    for j in range(own):
        at_own = ((a[:, None].to(tl.int64) * nkv + kv) * own + j) * D + d
        key = tl.load(OWN_K + at_own, tile, other=0.0).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * key, 1) * scale
        new = tl.maximum(top, score)
        p, shrink = tl.exp2(score - new), tl.exp2(top - new)
        value = tl.load(OWN_V + at_own, tile, other=0.0).to(tl.float32)
        acc = acc * shrink[:, None] + p[:, None] * value
        top, total = new, total * shrink + p
    total = tl.where(total == 0.0, 1.0, total)  # rows beyond the last query
    tl.store(OUT + at_q, (acc / total[:, None]).to(OUT.dtype.element_ty), tile)
    tl.store(LSE + head * queries + a, top + tl.log2(total), live)


@triton.jit
def _query_gradient(
    acc, q, grad, lse, delta, K, V, row, start, begin, end, scale, kv, nkv, d,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, BN):
        n = first + tl.arange(0, BN)
        k, v = _tile(K, n, kv, nkv, d, end, D, DP, MASKED), _tile(V, n, kv, nkv, d, end, D, DP, MASKED)
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale - lse[:, None])
        if MASKED:
            p = tl.where((n <= row[:, None]) & (n >= start[:, None]), p, 0.0)
        grad_s = p * (tl.dot(grad, v.T, input_precision=PRECISION) - delta[:, None])
        acc = tl.dot(grad_s.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["queries", "own"])
def _backward_queries(
    Q, K, V, OWN_K, OWN_V, ROWS, STARTS, OUT, GRAD, LSE, DELTA, GRAD_Q, scale, queries, own,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    kv, nkv = head // GROUP, HEADS // GROUP
    a, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, DP)
    live = a < queries
    row = tl.load(ROWS + a, live, other=-1).to(tl.int32)
    start = tl.load(STARTS + a, live, other=0x7FFFFFFF).to(tl.int32)
    first, shared, end = _window(row, start, live, BN)
    at_q = (a[:, None].to(tl.int64) * HEADS + head) * D + d
    tile = live[:, None] & (d < D)
    q, grad = tl.load(Q + at_q, tile, other=0.0), tl.load(GRAD + at_q, tile, other=0.0)
    out = tl.load(OUT + at_q, tile, other=0.0)
    lse = tl.load(LSE + head * queries + a, live, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + head * queries + a, delta, live)
    acc = tl.zeros([BM, DP], tl.float32)
    acc = _query_gradient(
        acc, q, grad, lse, delta, K, V, row, start, first, shared, scale, kv, nkv, d, D, DP, BN, False, PRECISION
    )
    acc = _query_gradient(
        acc, q, grad, lse, delta, K, V, row, start, shared, end, scale, kv, nkv, d, D, DP, BN, True, PRECISION
    )
    for j in range(own):
        at_own = ((a[:, None].to(tl.int64) * nkv + kv) * own + j) * D + d
        key = tl.load(OWN_K + at_own, tile, other=0.0).to(tl.float32)
        value = tl.load(OWN_V + at_own, tile, other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(q.to(tl.float32) * key, 1) * scale - lse)
        grad_s = p * (tl.sum(grad.to(tl.float32) * value, 1) - delta)
        acc += grad_s[:, None] * key
    tl.store(GRAD_Q + at_q, (acc * (scale / 1.4426950408889634)).to(GRAD_Q.dtype.element_ty), tile)


@triton.jit
def _key_gradients(
    grad_k, grad_v, k, v, n, Q, GRAD, LSE, DELTA, ROWS, STARTS, begin, end, scale, head, queries, d,
    HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradients from queries begin ... end of one head."""
    for first in range(begin, end, BM):
        a = first + tl.arange(0, BM)
        live = a < end
        at_q = (a[:, None].to(tl.int64) * HEADS + head) * D + d
        q = tl.load(Q + at_q, live[:, None] & (d < D), other=0.0)
        lse = tl.load(LSE + head * queries + a, live, other=float("inf"))  # infinite: a probability of 0
        p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * scale - lse)  # [BN, BM]
        if MASKED:
            row = tl.load(ROWS + a, live, other=-1).to(tl.int32)
            start = tl.load(STARTS + a, live, other=0).to(tl.int32)
            p = tl.where((n[:, None] <= row) & (n[:, None] >= start), p, 0.0)
        grad = tl.load(GRAD + at_q, live[:, None] & (d < D), other=0.0)
        grad_v = tl.dot(p.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
        delta = tl.load(DELTA + head * queries + a, live, other=0.0)
        grad_s = p * (tl.dot(v, grad.T, input_precision=PRECISION) - delta)
        grad_k = tl.dot(grad_s.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["queries", "tokens"])
def _backward_keys(
    Q, K, V, ROWS, STARTS, RANGES, GRAD, LSE, DELTA, GRAD_K, GRAD_V, scale, queries, tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, kv = tl.program_id(0), tl.program_id(1)
    nkv: tl.constexpr = HEADS // GROUP
    n, d = block * BN + tl.arange(0, BN), tl.arange(0, DP)
    there = (n < tokens)[:, None] & (d < D)
    at_k = (n[:, None].to(tl.int64) * nkv + kv) * D + d
    k, v = tl.load(K + at_k, there, other=0.0), tl.load(V + at_k, there, other=0.0)
    begin, whole = tl.load(RANGES + 4 * block).to(tl.int32), tl.load(RANGES + 4 * block + 1).to(tl.int32)
    part, end = tl.load(RANGES + 4 * block + 2).to(tl.int32), tl.load(RANGES + 4 * block + 3).to(tl.int32)
    grad_k, grad_v = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, DP], tl.float32)
    for head in range(kv * GROUP, kv * GROUP + GROUP):
        grad_k, grad_v = _key_gradients(
            grad_k, grad_v, k, v, n, Q, GRAD, LSE, DELTA, ROWS, STARTS, begin, whole, scale, head, queries, d,
            HEADS, D, BM, True, PRECISION,
        )  # fmt: skip
        grad_k, grad_v = _key_gradients(
            grad_k, grad_v, k, v, n, Q, GRAD, LSE, DELTA, ROWS, STARTS, whole, part, scale, head, queries, d,
            HEADS, D, BM, False, PRECISION,
        )  # fmt: skip
        grad_k, grad_v = _key_gradients(
            grad_k, grad_v, k, v, n, Q, GRAD, LSE, DELTA, ROWS, STARTS, part, end, scale, head, queries, d,
            HEADS, D, BM, True, PRECISION,
        )  # fmt: skip
    tl.store(GRAD_K + at_k, (grad_k * (scale / 1.4426950408889634)).to(GRAD_K.dtype.element_ty), there)
    tl.store(GRAD_V + at_k, grad_v.to(GRAD_V.dtype.element_ty), there)


@triton.jit(do_not_specialize=["queries", "own"])
def _backward_own(
    Q, OWN_K, OWN_V, GRAD, LSE, DELTA, GRAD_K, GRAD_V, scale, queries, own,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    kv, nkv = tl.program_id(1), HEADS // GROUP
    a, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, DP)
    live = a < queries
    tile = live[:, None] & (d < D)
    for j in range(own):
        at_own = ((a[:, None].to(tl.int64) * nkv + kv) * own + j) * D + d
        key = tl.load(OWN_K + at_own, tile, other=0.0).to(tl.float32)
        value = tl.load(OWN_V + at_own, tile, other=0.0).to(tl.float32)
        grad_k, grad_v = tl.zeros([BM, DP], tl.float32), tl.zeros([BM, DP], tl.float32)
        for head in range(kv * GROUP, kv * GROUP + GROUP):
            at_q = (a[:, None].to(tl.int64) * HEADS + head) * D + d
            q = tl.load(Q + at_q, tile, other=0.0).to(tl.float32)
            grad = tl.load(GRAD + at_q, tile, other=0.0).to(tl.float32)
            lse = tl.load(LSE + head * queries + a, live, other=0.0)
            delta = tl.load(DELTA + head * queries + a, live, other=0.0)
            p = tl.exp2(tl.sum(q * key, 1) * scale - lse)
            grad_s = p * (tl.sum(grad * value, 1) - delta)
            grad_k += grad_s[:, None] * q
            grad_v += p[:, None] * grad
        tl.store(GRAD_K + at_own, (grad_k * (scale / 1.4426950408889634)).to(GRAD_K.dtype.element_ty), tile)
        tl.store(GRAD_V + at_own, grad_v.to(GRAD_V.dtype.element_ty), tile)


def _shape(q: Tensor, keys: Tensor) -> dict[str, Any]:
    heads, d = q.shape[1:]
    shape = {"HEADS": heads, "GROUP": heads // keys.shape[1], "D": d, "DP": max(16, triton.next_power_of_2(d))}
    return shape | {"PRECISION": "ieee" if q.dtype == torch.float32 else "tf32"}


class TTTAttention(torch.autograd.Function):
    """See `ttt_attention` and `Visible`, whose ranges are cut by key_block; indices are int64, on q's device."""

    @staticmethod
    def forward(ctx, q, keys, values, own_k, own_v, rows, starts, ranges, key_block):
        q, keys, values, own_k, own_v = (x.contiguous() for x in (q, keys, values, own_k, own_v))
        (queries, heads, d), shape = q.shape, _shape(q, keys)
        out, lse = torch.empty_like(q), q.new_empty(heads, queries, dtype=torch.float32)
        block = FORWARD[d > 128]
        if queries:
            _forward[(triton.cdiv(queries, block["BM"]), heads)](
                q, keys, values, own_k, own_v, rows, starts, out, lse, d**-0.5 * LOG2_E, queries, own_k.shape[2],
                **shape, **block,
            )  # fmt: skip
        ctx.save_for_backward(q, keys, values, own_k, own_v, rows, starts, ranges, out, lse)
        ctx.key_block = key_block
        return out

    @staticmethod
    def backward(ctx, *grad_outputs):
        q, keys, values, own_k, own_v, rows, starts, ranges, out, lse = ctx.saved_tensors
        grad, (queries, heads, d), shape = grad_outputs[0].contiguous(), q.shape, _shape(q, keys)
        own, scale, delta = own_k.shape[2], d**-0.5 * LOG2_E, torch.empty_like(lse)
        grads = [torch.empty_like(x) for x in (q, keys, values, own_k, own_v)]
        grad_q, grad_k, grad_v, grad_own_k, grad_own_v = grads
        if queries:
            block = QUERIES[d > 128]
            _backward_queries[(triton.cdiv(queries, block["BM"]), heads)](
                q, keys, values, own_k, own_v, rows, starts, out, grad, lse, delta, grad_q, scale, queries, own,
                **shape, **block,
            )  # fmt: skip
        _backward_keys[(len(ranges), keys.shape[1])](
            q, keys, values, rows, starts, ranges, grad, lse, delta, grad_k, grad_v, scale, queries, len(keys),
            BN=ctx.key_block, **shape, **KEYS[d > 128],
        )  # fmt: skip
        if queries and own:
            shape.pop("PRECISION")
            _backward_own[(triton.cdiv(queries, 16), keys.shape[1])](
                q, own_k, own_v, grad, lse, delta, grad_own_k, grad_own_v, scale, queries, own,
                BM=16, **shape, num_warps=4,
            )  # fmt: skip
        return *grads, None, None, None, None
