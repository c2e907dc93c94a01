"""Tiny random models of each family that targets come from, saved as ordinary folders."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    # a window of 6 is shorter than the test sequences, so sliding layers really slide
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "mistral": {"head_dim": 8, "sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **MOE},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **MOE,
    },
}


def save_model(folder: Path, family: str, **overrides) -> Path:
    """A model whose norms are not at their initial values, so that a wrong flavour of norm shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SHAPE | FAMILIES[family] | overrides))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 0.8, 0.2)
    model.save_pretrained(folder)
    return folder
