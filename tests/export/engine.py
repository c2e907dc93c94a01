"""EAGLE-3's one-layer draft as the serving engines compute it, written out plainly and without a cache."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


def engine_logits(
    layer: dict, flags: dict, weights: dict[str, Tensor], embed: Tensor, aux: Tensor, input_ids: list[int]
) -> list[Tensor]:
    """Logits [Vd] of the last verified row, then of each chain row fed with its own state.

    layer: a Llama config as exported; weights by speculators' names; aux [verified, A*H]; input_ids: the token
    after each row's position, chain rows included.
    """
    heads, kv, d = layer["num_attention_heads"], layer["num_key_value_heads"], layer["head_dim"]
    rotary = LlamaRotaryEmbedding(LlamaConfig(**layer))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], layer["rms_norm_eps"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    if flags.get("norm_before_fc"):
        aux = norm(aux, "input_norm")
    if flags.get("fc_norm"):
        chunks = aux.chunk(layer["num_aux_hidden_states"], -1)
        aux = torch.cat([norm(part, f"fc_norm.{j}") for j, part in enumerate(chunks)], -1)
    rows = len(aux)
    hidden, keys, values, out = linear(aux, "fc"), [], [], []
    for start in [0, *range(rows, len(input_ids))]:
        t = len(hidden)
        ids = torch.tensor(input_ids[start : start + t])
        normed = norm(hidden, "layers.0.hidden_norm")
        both = torch.cat([norm(embed[ids], "layers.0.input_layernorm"), normed], -1)  # [T, 2H]
        q, k, v = (linear(both, f"layers.0.self_attn.{n}_proj").view(1, t, -1, d).transpose(1, 2) for n in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *rotary(both[None], torch.arange(start, start + t)[None]))
        keys.append(k)
        values.append(v)
        k, v = (torch.cat(x, 2).repeat_interleave(heads // kv, 1) for x in (keys, values))
        mask = torch.ones(t, start + t, dtype=torch.bool).tril(start)
        attended = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(t, heads * d)
        residual = normed if flags.get("norm_before_residual") else hidden
        state = residual + linear(attended, "layers.0.self_attn.o_proj")
        x = norm(state, "layers.0.post_attention_layernorm")
        gated = F.silu(linear(x, "layers.0.mlp.gate_proj")) * linear(x, "layers.0.mlp.up_proj")
        state = (state + linear(gated, "layers.0.mlp.down_proj"))[-1:]
        final = norm(state, "norm")
        out.append(linear(final, "lm_head")[0])
        hidden = final if flags.get("norm_output") else state
    return out
