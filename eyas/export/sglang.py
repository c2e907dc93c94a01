"""The SGLang layout: an `LlamaForCausalLMEagle3` config with `midlayer.` names, as SpecForge exports it.

vLLM serves such a folder too: it reads the aux layers at the top level, SGLang those inside `eagle_config`.
"""

from typing import Any

from eyas.draft.config import FLAGS, Eagle3DraftConfig
from eyas.errors import EyasError
from eyas.export import vllm
from eyas.target.spec import TargetSpec

LAYER = "midlayer."  # what the one layer's tensors are called
# Targets for which SGLang takes a list that begins with 1 for outputs of blocks, any other for boundaries.
AS_IS_UNLESS_FIRST_IS_1 = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"}
NOTES = """\
- Give all three numbers or none; a chain of n tokens is num-steps n, eagle-topk 1, num-draft-tokens n + 1.
- A quantised target passes its quantisation on: add `--speculative-draft-model-quantization unquant`.
- `--speculative-token-map` has no effect on EAGLE3: the draft vocabulary is in the weights (d2t)."""


def check(draft: Eagle3DraftConfig, spec: TargetSpec) -> None:
    """Raise EyasError for what SGLang would misread without a word."""
    aux, last, reason = list(draft.aux_layers), spec.num_layers, ""
    if draft.norm_before_residual:
        reason = "SGLang has no norm_before_residual: the raw state would go into the residual branch"
    elif draft.num_aux == 1:
        reason = "SGLang tells aux states from the draft's own by their width: a single aux layer never passes fc"
    elif boundaries(layer_ids(aux, spec), spec) != aux or aux[0] == 0:
        reason = f"SGLang cannot capture boundaries {aux} of a {spec.model_type} target"
    elif aux[-1] == last and spec.model_type != "gpt_oss":
        reason = f"SGLang captures on entering a block; no block is entered at boundary {last}"
    if reason:
        fit = f"norm_before_residual false and two or more aux layers from 2 to {last - 1}"
        raise EyasError(reason, f"set export.layouts to [vllm], which serves it; for SGLang train with {fit}")


def layer_ids(aux_layers: list[int], spec: TargetSpec) -> list[int]:
    """Boundaries in the words of `eagle_config`: the block whose output it is, but for some families."""
    as_is = spec.model_type in AS_IS_UNLESS_FIRST_IS_1 and aux_layers[0] != 2
    return aux_layers if as_is else [i - 1 for i in aux_layers]


def boundaries(ids: list[int], spec: TargetSpec) -> list[int]:
    """The boundaries that SGLang captures when it reads `ids`."""
    as_is = spec.model_type in AS_IS_UNLESS_FIRST_IS_1 and ids[0] != 1
    as_is |= spec.model_type == "gpt_oss" and max(ids) == spec.num_layers
    return ids if as_is else [i + 1 for i in ids]


def config(draft: Eagle3DraftConfig, spec: TargetSpec, dtype: str, draft_tokens: int) -> dict[str, Any]:
    """config.json. `target_hidden_size` stays out: SGLang tests whether it is there, not what it is."""
    aux = list(draft.aux_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **vllm.layer_config(draft),
        "draft_vocab_size": draft.draft_vocab_size,
        **{flag: getattr(draft, flag) for flag in FLAGS},
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids(aux, spec), "use_aux_hidden_state": True},
        "torch_dtype": dtype,
    }


def serving(target: str, folder: str, draft_tokens: int) -> tuple[str, dict[str, Any]]:
    """(shell command, the same as arguments of `sglang.Engine`) that serve target and draft."""
    options = {"model_path": target, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": folder}
    options |= {"speculative_num_steps": draft_tokens, "speculative_eagle_topk": 1}
    options |= {"speculative_num_draft_tokens": draft_tokens + 1}
    flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in options.items())
    return f"python -m sglang.launch_server {flags}", options
