"""The parts of the draft's one decoder layer, with the tensor names that servers expect."""

import torch
from torch import Tensor, nn

from eyas.draft.config import Eagle3DraftConfig
from eyas.errors import EyasError
from eyas.kernels.swiglu import swiglu


class Attention(nn.Module):
    """Projections of width-2H inputs, embedding half first, so that each half can be projected on its own."""

    def __init__(self, config: Eagle3DraftConfig):
        super().__init__()
        h, self.head_dim = config.hidden_size, config.head_dim
        queries, shared = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(2 * h, queries, bias=False)
        self.k_proj = nn.Linear(2 * h, shared, bias=False)
        self.v_proj = nn.Linear(2 * h, shared, bias=False)
        self.o_proj = nn.Linear(queries, h, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        """[A, n * d] -> [A, n, d]"""
        return x.unflatten(1, (x.shape[1] // self.head_dim, self.head_dim))


class MLP(nn.Module):
    def __init__(self, config: Eagle3DraftConfig):
        super().__init__()
        h, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(h, inner, bias=False)
        self.up_proj = nn.Linear(h, inner, bias=False)
        self.down_proj = nn.Linear(inner, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: Eagle3DraftConfig):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(h, eps)
        self.hidden_norm = nn.RMSNorm(h, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(h, eps)
        self.mlp = MLP(config)

    def finish(self, hidden: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """From attention's output [A, nh, d] to the layer's: both residual additions and the MLP."""
        residual = normed if self.norm_before_residual else hidden
        h = residual + self.self_attn.o_proj(attended.flatten(1))
        return h + self.mlp(self.post_attention_layernorm(h))


class DraftCache:
    """Keys and values of one sequence; entry t belongs to row t, so crop, append and look-up need no positions."""

    def __init__(self, shape: tuple[int, int, int], cos: Tensor, sin: Tensor):
        """shape: (nkv, capacity, d); cos and sin [capacity, d / 2]."""
        self.keys, self.values = cos.new_empty(shape), cos.new_empty(shape)
        self.cos, self.sin, self.length = cos, sin, 0

    def crop(self, length: int) -> None:
        """Forget the rows from `length` on (no effect on a shorter cache)."""
        self.length = min(self.length, length)

    def turn(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """cos, sin and the positions [rows] of the next rows. Raises EyasError when there is no room for them."""
        end, capacity = self.length + rows, self.keys.shape[1]
        if end > capacity:
            raise EyasError(f"draft cache is full: {end} rows, capacity {capacity}")
        return self.cos, self.sin, torch.arange(self.length, end, device=self.cos.device)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows [T, nkv, d]; return all keys and values [nkv, length, d]."""
        start, self.length = self.length, self.length + len(keys)
        self.keys[:, start : self.length] = keys.transpose(0, 1)
        self.values[:, start : self.length] = values.transpose(0, 1)
        return self.keys[:, : self.length], self.values[:, : self.length]


class Rope:
    """Rotation tables; not a module, so that casting the model to bf16 cannot touch the frequencies."""

    def __init__(self, config: Eagle3DraftConfig):
        self.made: tuple[Tensor, Tensor] | None = None  # the last table, kept for the next pass
        rope, d = config.rope_parameters, config.head_dim
        if rope["rope_type"] == "default":
            steps = torch.arange(0, d, 2, device="cpu").float() / d
            self.frequencies, self.scale = 1.0 / rope["rope_theta"] ** steps, 1.0
            return
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        keys = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
        llama = LlamaConfig(**{k: getattr(config, k) for k in keys}, rope_parameters=dict(rope))
        with torch.device("cpu"):  # also where a draft is built of shapes alone, on the meta device
            self.frequencies, self.scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](llama, torch.device("cpu"))

    def table(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [P, d / 2] of positions 0 ... P - 1, P >= `positions`, in dtype and on device of `like`."""
        made = self.made
        if (
            made is None
            or len(made[0]) < positions
            or (made[0].dtype, made[0].device) != (like.dtype, like.device)
        ):
            size = 1 << (positions - 1).bit_length()
            angles = torch.arange(size, dtype=torch.float64)[:, None] * self.frequencies.double()
            made = self.made = ((angles.cos() * self.scale).to(like), (angles.sin() * self.scale).to(like))
        return made
