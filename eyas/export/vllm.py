"""The speculators layout, which vLLM loads: `transformer_layer_config` is taken as it stands, without defaults."""

from typing import Any

from eyas.draft.config import Eagle3DraftConfig
from eyas.export.tables import layer_config, refuse_unservable
from eyas.target.spec import TargetSpec


def check(draft: Eagle3DraftConfig, spec: TargetSpec) -> None:
    """Raise EyasError if vLLM could not serve this draft."""
    refuse_unservable(draft)


def tensor_name(name: str) -> str:
    """Tensors keep their names."""
    return name


def config(draft: Eagle3DraftConfig, spec: TargetSpec, dtype: str, draft_tokens: int) -> dict[str, Any]:
    """config.json. Every flag is written: vLLM takes an absent `norm_before_residual` for true, others for false.

    Aux layers are boundaries, vLLM's own convention. `num_aux_hidden_states` must stand in the layer config, where
    alone vLLM looks when there are not three.
    """
    layer = layer_config(draft)
    if layer["rope_scaling"] is None:
        del layer["rope_scaling"]
    local = spec.path.resolve() == spec.path.__class__(spec.name).expanduser().resolve()
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(draft.aux_layers),
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            # A folder's name means nothing to a server started elsewhere: its full path does.
            "verifier": {
                "name_or_path": str(spec.path.resolve()) if local else spec.name,
                "architectures": spec.architectures,
            },
        },
        "transformer_layer_config": layer,
    }


def serving(target: str, folder: str, draft_tokens: int) -> tuple[str, dict[str, Any]]:
    """(shell command, its JSON part) that serves target and draft."""
    options = {"method": "eagle3", "model": folder, "num_speculative_tokens": draft_tokens}
    return f"vllm serve {target} --speculative-config '$JSON'", options


NOTES = """\
- `vllm serve {folder}` alone works too: target, method and number of draft tokens are in config.json.
- The draft runs in the target's dtype. `draft_tensor_parallel_size` may be 1 or the target's.
- `fc_norm` and `norm_output` are read from vLLM 0.26 on; older ones drop them silently."""
