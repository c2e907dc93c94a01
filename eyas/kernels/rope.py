"""Rotary position embedding in the half-split layout (Su et al., 2021; the layout of Llama in transformers)."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """x [A, n, d] -> [A, n, d], row a turned by position positions[a]; cos and sin [P, d / 2] by position."""
    return _Rotate.apply(x, cos, sin, positions, False)


class _Rotate(torch.autograd.Function):
    """Written out because autograd's own backward takes three times as many passes."""

    @staticmethod
    def forward(ctx, x, cos, sin, positions, back):
        ctx.save_for_backward(cos, sin, positions)
        ctx.back = back
        if x.is_cuda:
            from eyas.kernels.elementwise_gpu import rotate

            return rotate(x, cos, sin, positions, back)
        cos, sin = cos[positions, None], sin[positions, None] * (-1 if back else 1)
        (a, b), out = x.chunk(2, -1), torch.empty_like(x)
        u, v = out.chunk(2, -1)
        torch.mul(a, cos, out=u).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=v).addcmul_(a, sin)
        return out

    @staticmethod
    def backward(ctx, *grad_outputs):
        return (
            _Rotate.apply(grad_outputs[0].contiguous(), *ctx.saved_tensors, not ctx.back),
            None,
            None,
            None,
            None,
        )
