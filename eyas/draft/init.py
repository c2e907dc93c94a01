"""Initial weights of a draft: the target's where they mean the same, else random or constant; reported."""

import torch
from torch import Tensor

from eyas.draft.model import Eagle3DraftModel
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights

STD = 0.02  # of random matrices, as most targets' own `initializer_range`
PLAIN = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def init_weights(
    model: Eagle3DraftModel, weights: TargetWeights, spec: TargetSpec, mode: str = "target", seed: int = 0
) -> dict[str, dict[str, str]]:
    """Set every trained tensor; the same arguments give the same bits.

    mode "target": fc passes the highest aux state on; attention's hidden half, the MLP and the norms are those of
    the target's last layer, so that the draft starts as a target that skips to its last layer; the embedding half
    of q, k and v starts at zero, silent until training finds a use for it, behind a norm of ones (layer 0's own
    norm can be so small that this half learns slowly: replayed tau 1.54 against 1.56 on SmolLM2). mode "random":
    matrices normal (0, 0.02), norms 1. In both, lm_head and the final norm are the target's.
    Returns {"copied": {tensor: source}, "random": {tensor: why not copied}, "constant": {tensor: value and why}}.
    """
    final_norm, head = weights.final_norm(), weights.lm_head()
    rows = head[model.draft_ids().to(head.device)]
    found = {"lm_head.weight": (rows, "lm_head rows of the draft vocabulary")}
    found["norm.weight"] = (_norm(final_norm.weight, final_norm.flavour), "final norm")
    refused: dict[str, str] = {}
    if mode == "target":
        more, refused = _last_layer(model, weights, spec, final_norm.flavour)
        found |= more
    report: dict[str, dict[str, str]] = {"copied": {}, "random": {}, "constant": {}}
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        value, source = found.get(name, (None, ""))
        if value is not None and value.shape == tensor.shape:
            tensor.copy_(value)
            report["copied"][name] = source
            continue
        why = "asked for random weights" if mode == "random" else "the target has no such tensor"
        if value is not None:
            why = f"the target's is {list(value.shape)}, the draft's {list(tensor.shape)}"
        why = refused.get(name, why)
        if tensor.dim() == 1:
            tensor.fill_(1.0)
            report["constant"][name] = f"1: {why}"
        else:
            tensor.copy_(torch.empty(tensor.shape).normal_(0, STD, generator=generator))
            report["random"][name] = why
    return report


def _last_layer(
    model: Eagle3DraftModel, weights: TargetWeights, spec: TargetSpec, flavour: str
) -> tuple[dict[str, tuple[Tensor, str]], dict[str, str]]:
    """What the draft can take from the last layer, and fc: {tensor: (value, source)}, {tensor: why not}."""
    h, index = model.config.hidden_size, spec.num_layers - 1
    last = {k: v for k, v in weights.layer(index).items() if v.dtype in PLAIN}
    # Families with norms behind attention and MLP name the one before the MLP differently.
    sandwich = "pre_feedforward_layernorm.weight" in last
    before_mlp = "pre_feedforward_layernorm.weight" if sandwich else "post_attention_layernorm.weight"
    sources = {"hidden_norm.weight": "input_layernorm.weight", "post_attention_layernorm.weight": before_mlp}
    matrices = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    matrices += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    fc = torch.zeros(model.fc.weight.shape)
    fc[:, -h:] = torch.eye(h)
    found = {"fc.weight": (fc, f"identity on the highest aux state (boundary {model.config.aux_layers[-1]})")}
    refused: dict[str, str] = {}
    for draft, source in (sources | dict(zip(matrices, matrices, strict=True))).items():
        if source not in last:
            continue
        name, value, part = f"layers.0.{draft}", last[source].float(), source.removesuffix("_proj.weight")
        if part in ("self_attn.q", "self_attn.k") and {f"{part}_norm.weight", f"{part}_proj.bias"} & last.keys():
            refused[name] = "the target's has a norm or a bias behind it that the draft lacks"
        elif sandwich and part in ("self_attn.o", "mlp.down"):
            refused[name] = "the target has a norm behind it that the draft lacks"
        else:
            if draft in sources:
                value = _norm(value, flavour)
            elif part[-2:] in (".q", ".k", ".v"):
                value = torch.cat([torch.zeros_like(value), value], 1)
            found[name] = (value, f"layer {index} {source}")
    return found, refused


def _norm(weight: Tensor, flavour: str) -> Tensor:
    """A norm's weight as the draft multiplies by it."""
    return 1.0 + weight.float() if flavour == "gemma" else weight.float()
