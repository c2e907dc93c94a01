"""What the two layouts have in common: the tensors of a draft, and RoPE in the words of old and new readers."""

from typing import Any

from eyas.draft.config import Eagle3DraftConfig
from eyas.errors import EyasError


def tensor_shapes(draft: Eagle3DraftConfig) -> dict[str, list[int]]:
    """Name and shape of every tensor of a one-layer draft, in speculators' names; tables only when pruned."""
    h, i, d, a = draft.hidden_size, draft.intermediate_size, draft.head_dim, draft.num_aux
    q, kv = draft.num_attention_heads * d, draft.num_key_value_heads * d
    shapes = {
        "fc.weight": [h, a * draft.target_hidden_size],
        "layers.0.input_layernorm.weight": [h],
        "layers.0.hidden_norm.weight": [h],
        "layers.0.self_attn.q_proj.weight": [q, 2 * h],
        "layers.0.self_attn.k_proj.weight": [kv, 2 * h],
        "layers.0.self_attn.v_proj.weight": [kv, 2 * h],
        "layers.0.self_attn.o_proj.weight": [h, q],
        "layers.0.post_attention_layernorm.weight": [h],
        "layers.0.mlp.gate_proj.weight": [i, h],
        "layers.0.mlp.up_proj.weight": [i, h],
        "layers.0.mlp.down_proj.weight": [h, i],
        "norm.weight": [h],
        "lm_head.weight": [draft.draft_vocab_size, h],
    }
    if draft.norm_before_fc:
        shapes["input_norm.weight"] = [a * draft.target_hidden_size]
    if draft.fc_norm:
        shapes |= {f"fc_norm.{j}.weight": [draft.target_hidden_size] for j in range(a)}
    if draft.pruned:
        shapes |= {"d2t": [draft.draft_vocab_size], "t2d": [draft.vocab_size]}
    return shapes


def layer_config(draft: Eagle3DraftConfig) -> dict[str, Any]:
    """The keys of a Llama config that both engines read, none left to a class default.

    RoPE is written twice: `rope_theta` + `rope_scaling` for older readers, `rope_parameters` for newer ones.
    """
    rope = {k: v for k, v in draft.rope_parameters.items() if k != "partial_rotary_factor"}
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    plain = rope["rope_type"] == "default"
    return {
        "model_type": "llama",
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "hidden_act": draft.hidden_act,
        "rms_norm_eps": draft.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": draft.max_position_embeddings,
        "vocab_size": draft.vocab_size,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else scaling | {"type": rope["rope_type"]},
        "rope_parameters": rope,
        "num_aux_hidden_states": draft.num_aux,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def refuse_unservable(draft: Eagle3DraftConfig) -> None:
    """Raise EyasError for what no engine's draft layer computes."""
    if draft.hidden_act != "silu":
        raise EyasError(
            f"the draft's MLP uses {draft.hidden_act}; the Llama drafts of vLLM and SGLang know silu only",
            "train the draft with hidden_act silu",
        )
