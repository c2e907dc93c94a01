"""The speculators layout, which vLLM loads. It takes `transformer_layer_config` as it stands, without defaults."""

from pathlib import Path
from typing import Any

from eyas.draft.config import FLAGS, Eagle3DraftConfig
from eyas.target.spec import TargetSpec

LAYER = "layers.0."  # what the one layer's tensors are called
NOTES = """\
- `vllm serve {folder}` alone works too: its config.json names target, method and number of draft tokens.
- The draft runs in the target's dtype; `draft_tensor_parallel_size` is 1 or the target's.
- vLLM before 0.26 drops `fc_norm` and `norm_output` silently."""


def layer_config(draft: Eagle3DraftConfig) -> dict[str, Any]:
    """The Llama config both engines read, with RoPE in the older spelling and in the newer, `rope_parameters`."""
    rope = dict(draft.rope_parameters)
    scaling = {"type": rope["rope_type"]} | {k: v for k, v in rope.items() if k != "rope_theta"}
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same += ("hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size")
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{key: getattr(draft, key) for key in same},
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "num_aux_hidden_states": draft.num_aux,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def config(draft: Eagle3DraftConfig, spec: TargetSpec, dtype: str, draft_tokens: int) -> dict[str, Any]:
    """config.json. Every flag is written: an absent `norm_before_residual` is true to vLLM, false to others."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    # A folder is named by its full path: the server may start elsewhere.
    name = str(spec.path.resolve()) if Path(spec.name).expanduser().is_dir() else spec.name
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": None,
        **{flag: getattr(draft, flag) for flag in FLAGS},
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(draft.aux_layers),
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": spec.architectures},
        },
        "transformer_layer_config": {k: v for k, v in layer_config(draft).items() if v is not None},
    }


def serving(target: str, folder: str, draft_tokens: int) -> tuple[str, dict[str, Any]]:
    """(shell command, the value of its --speculative-config) that serve target and draft."""
    options = {"method": "eagle3", "model": folder, "num_speculative_tokens": draft_tokens}
    return f"vllm serve {target} --speculative-config '$JSON'", options
