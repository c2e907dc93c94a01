"""Triton kernels of the small operators (`swiglu`, `rope`): one pass over memory each, arithmetic in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _swiglu(GATE, UP, OUT, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    gate, up = tl.load(GATE + at, live).to(tl.float32), tl.load(UP + at, live).to(tl.float32)
    tl.store(OUT + at, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), live)


@triton.jit
def _swiglu_backward(GRAD, GATE, UP, GRAD_GATE, GRAD_UP, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    gate, up = tl.load(GATE + at, live).to(tl.float32), tl.load(UP + at, live).to(tl.float32)
    grad, share = tl.load(GRAD + at, live).to(tl.float32), tl.sigmoid(gate)
    tl.store(GRAD_GATE + at, (grad * up * share * (1 + gate * (1 - share))).to(GRAD_GATE.dtype.element_ty), live)
    tl.store(GRAD_UP + at, (grad * gate * share).to(GRAD_UP.dtype.element_ty), live)


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    X, COS, SIN, POSITIONS, OUT, rows, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row, head, d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BH), tl.arange(0, BD)
    position = tl.load(POSITIONS + row, row < rows, other=0)
    at, live = position[:, None] * HALF + d, (row < rows)[:, None] & (d < HALF)
    cos = tl.load(COS + at, live, other=0.0).to(tl.float32)[:, None, :]
    sin = tl.load(SIN + at, live, other=0.0).to(tl.float32)[:, None, :] * sign
    at = (row[:, None, None].to(tl.int64) * HEADS + head[:, None]) * 2 * HALF + d
    tile = live[:, None, :] & (head < HEADS)[:, None]
    a, b = tl.load(X + at, tile).to(tl.float32), tl.load(X + at + HALF, tile).to(tl.float32)
    tl.store(OUT + at, (a * cos - b * sin).to(OUT.dtype.element_ty), tile)
    tl.store(OUT + at + HALF, (b * cos + a * sin).to(OUT.dtype.element_ty), tile)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up: contiguous, one shape."""
    out = torch.empty_like(gate)
    _swiglu[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad_gate, grad_up, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    grad = grad.contiguous()
    _swiglu_backward[(triton.cdiv(size, BLOCK),)](grad, gate, up, grad_gate, grad_up, size, BLOCK=BLOCK)
    return grad_gate, grad_up


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, back: bool) -> Tensor:
    """x [A, n, d]; cos, sin [P, d / 2]; positions [A] int64; back turns the other way."""
    x = x.contiguous()
    out, (rows, heads, d) = torch.empty_like(x), x.shape
    wide, tall = triton.next_power_of_2(d // 2), triton.next_power_of_2(heads)
    block = max(1, 4096 // (wide * tall))
    if rows:
        _rotate[(triton.cdiv(rows, block),)](
            x, cos, sin, positions, out, rows, -1.0 if back else 1.0,
            HEADS=heads, HALF=d // 2, BR=block, BH=tall, BD=wide,
        )  # fmt: skip
    return out
