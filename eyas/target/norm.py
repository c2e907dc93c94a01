"""The target's final norm, in each of the three ways that families compute an RMSNorm."""

import torch
from torch import Tensor, nn

# gemma: cast(x/rms * (1 + w)); fp32: cast(x/rms * w); the rest, llama: cast(x/rms) * w. The cast is to x's dtype.
GEMMA = {"gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "t5gemma", "vaultgemma", "qwen3_next"}
GEMMA |= {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "minimax_m3_vl", "minimax_m3_vl_text"}
FP32 = {"gpt_oss", "olmo2", "olmo3", "olmo_hybrid", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"}


def flavour_of(model_type: str) -> str:
    """How the family of `model_type` applies the norm's weight."""
    return "gemma" if model_type in GEMMA else "fp32" if model_type in FP32 else "llama"


class FinalNorm(nn.Module):
    """RMSNorm with a frozen weight [H], rounding where the target itself rounds."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float, flavour: str = "llama"):
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps, self.flavour = eps, flavour

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] before the norm -> [..., H] after it, in x's dtype; computed in fp32."""
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.flavour == "llama":
            return self.weight.to(x.dtype) * normed.to(x.dtype)
        weight = self.weight.float()
        return (normed * (1.0 + weight if self.flavour == "gemma" else weight)).to(x.dtype)
