"""SwiGLU's elementwise half: silu(gate) * up. Backward makes silu again: only `gate` and `up` are kept."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [A, I] -> [A, I]; computed in fp32 on a GPU."""
    if gate.is_cuda:
        return _SwiGLU.apply(gate, up)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        from eyas.kernels.elementwise_gpu import swiglu_forward

        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    def backward(ctx, *grad_outputs):
        from eyas.kernels.elementwise_gpu import swiglu_backward

        return swiglu_backward(grad_outputs[0], *ctx.saved_tensors)
