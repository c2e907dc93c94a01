"""The SGLang layout: an `LlamaForCausalLMEagle3` config with `midlayer.` names, as SpecForge exports it.

vLLM serves such a folder too: it reads the aux layers at the top level (as boundaries), SGLang those in `eagle_config`.
"""

from typing import Any

from eyas.draft.config import Eagle3DraftConfig
from eyas.errors import EyasError
from eyas.export.tables import layer_config, refuse_unservable
from eyas.target.spec import TargetSpec

# Targets whose SGLang model counts blocks in two ways: a list that begins with 1 names outputs of blocks, any other
# list is taken for boundaries as it stands. Multimodal shells (kimi_k25) pass the list on to these.
AS_IS_UNLESS_FIRST_IS_1 = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa")


def check(draft: Eagle3DraftConfig, spec: TargetSpec) -> None:
    """Raise EyasError for what SGLang would misread without a word."""
    refuse_unservable(draft)
    other = "set export.layouts to [vllm], which serves it as it is"
    if draft.norm_before_residual:
        raise EyasError(
            "SGLang has no norm_before_residual: it would add the raw state to the residual branch",
            f"{other}; for SGLang train with draft.norm_before_residual false",
        )
    if draft.num_aux == 1:
        raise EyasError(
            "SGLang tells aux states from the draft's own by their width, so a single aux layer never passes fc",
            f"{other}; for SGLang train with two aux layers or more",
        )
    ids = layer_ids(list(draft.aux_layers), spec.model_type)
    if boundaries(ids, spec.model_type, spec.num_layers) != list(draft.aux_layers) or draft.aux_layers[0] == 0:
        raise EyasError(
            f"SGLang cannot capture boundaries {list(draft.aux_layers)} of a {spec.model_type} target",
            f"{other}; for SGLang use aux layers from 2 to {spec.num_layers - 1}",
        )
    if draft.aux_layers[-1] == spec.num_layers and spec.model_type != "gpt_oss":
        raise EyasError(
            f"SGLang captures on entering a block; nothing enters a block at boundary {spec.num_layers}",
            f"{other}; for SGLang use aux layers up to {spec.num_layers - 1}",
        )


def layer_ids(aux_layers: list[int], model_type: str) -> list[int]:
    """Boundaries in the words of `eagle_config.eagle_aux_hidden_state_layer_ids`: the block whose output it is."""
    if model_type in AS_IS_UNLESS_FIRST_IS_1 and aux_layers[0] != 2:
        return list(aux_layers)
    return [i - 1 for i in aux_layers]


def boundaries(ids: list[int], model_type: str, num_layers: int) -> list[int]:
    """The boundaries that SGLang captures when it reads `ids`."""
    as_is = model_type in AS_IS_UNLESS_FIRST_IS_1 and ids[0] != 1
    as_is |= model_type == "gpt_oss" and max(ids) == num_layers
    return list(ids) if as_is else [i + 1 for i in ids]


def tensor_name(name: str) -> str:
    """The one layer is called midlayer."""
    return name.replace("layers.0.", "midlayer.")


def config(draft: Eagle3DraftConfig, spec: TargetSpec, dtype: str, draft_tokens: int) -> dict[str, Any]:
    """config.json. `target_hidden_size` must stay out: SGLang tests whether it is there, not what it is."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(draft),
        "draft_vocab_size": draft.draft_vocab_size,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "norm_before_fc": draft.norm_before_fc,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(draft.aux_layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layer_ids(list(draft.aux_layers), spec.model_type),
            "use_aux_hidden_state": True,
        },
        "torch_dtype": dtype,
    }


def serving(target: str, folder: str, draft_tokens: int) -> tuple[str, dict[str, Any]]:
    """(shell command, the same as keyword arguments of `sglang.Engine`) that serves target and draft."""
    options = {
        "model_path": target,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": folder,
        "speculative_num_steps": draft_tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": draft_tokens + 1,
    }
    flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in options.items())
    return f"python -m sglang.launch_server {flags}", options


NOTES = """\
- Give all three numbers or none; a chain of n tokens is num-steps n, eagle-topk 1, num-draft-tokens n + 1.
- A quantised target passes its quantisation on to the draft: add `--speculative-draft-model-quantization unquant`.
- `--speculative-token-map` has no effect on EAGLE3: the draft vocabulary is in the weights (d2t)."""
