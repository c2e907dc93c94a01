"""A draft folder as the engines read it: their renames and defaults, what they refuse and what they pass over."""

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.draft.config import DraftShapeError, Eagle3DraftConfig
from eyas.export import sglang
from eyas.target.spec import TargetSpec

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
SIZES += ("max_position_embeddings", "rms_norm_eps", "hidden_act")
RENAMES = {"midlayer.": "layers.0.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1."}
RENAMES |= {"aux_norm_high.": "fc_norm.2."}


@dataclass
class Findings:
    """What there is to say about a folder, in the form of the preflight's findings."""

    items: list[dict[str, Any]] = field(default_factory=list)

    def add(self, level: str, check: str, message: str, hint: str = "", **evidence: Any) -> None:
        finding = {"check": check, "level": level, "message": message, "hint": hint, "evidence": evidence}
        self.items.append(finding)

    @property
    def ok(self) -> bool:
        return not any(f["level"] == "error" for f in self.items)


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """config.json and its layout: vllm (speculators), sglang (SGLang, SpecForge) or raw (the authors' checkpoints).

    Raises ValueError for anything else.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from e
    architectures = config.get("architectures") or []
    if "speculators_config" in config:
        return config, "vllm"
    if architectures == ["LlamaForCausalLMEagle3"]:
        return config, "sglang"
    if architectures == ["LlamaForCausalLM"] and "draft_vocab_size" in config:
        return config, "raw"
    raise ValueError(
        f"{path} is of no EAGLE-3 layout known here (architectures {architectures}): expected speculators_config, "
        "LlamaForCausalLMEagle3, or LlamaForCausalLM with draft_vocab_size"
    )


def read_tensors(folder: Path, layout: str, found: Findings) -> dict[str, Tensor]:
    """Every tensor of the folder's weight files, renamed as the engine does. Raises ValueError."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ValueError(f"{folder} has neither *.safetensors nor pytorch_model.bin")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            pickled = file.suffix == ".bin"
            tensors |= torch.load(file, "cpu", weights_only=True) if pickled else load_file(file)
        except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError, OSError) as e:
            raise ValueError(f"{file} ({file.stat().st_size} bytes) cannot be read: {e}") from e
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            level = "warning" if layout == "sglang" else "error"
            found.add(level, "names", f"{name}: vLLM refuses the prefix `model.`, SGLang reads past it")
        name = name.removeprefix("model.")
        for old, new in RENAMES.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def read_shape(
    config: dict[str, Any], layout: str, spec: TargetSpec | None, found: Findings
) -> Eagle3DraftConfig | None:
    """The draft that the engine would build from config.json; None where it cannot be told. Adds findings."""
    speculators = layout == "vllm"
    layer = config.get("transformer_layer_config") if speculators else config
    layer = layer if isinstance(layer, dict) else {}
    missing = [key for key in SIZES if layer.get(key) is None]
    rope = _rope(layer, found)
    if missing:
        where = "transformer_layer_config" if speculators else "config.json"
        found.add("error", "config", f"{where} lacks {', '.join(missing)}", "write every value out")
    if missing or rope is None:
        return None
    head_dim = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    if layer.get("head_dim") is None:
        found.add("warning", "config", f"head_dim is not written; engines divide and get {head_dim}")
    before_residual = config.get("norm_before_residual")
    if before_residual is None and speculators:
        before_residual = True
        found.add("warning", "flags", "norm_before_residual is not written: true to vLLM, false to all others")
    if before_residual and layout == "sglang":
        found.add("error", "flags", "norm_before_residual is true; SGLang serves the draft as if it were false")
    nested = config.get("eagle_config") or {}
    try:
        return Eagle3DraftConfig(
            hidden_size=layer["hidden_size"],
            target_hidden_size=config.get("target_hidden_size") or layer["hidden_size"],
            intermediate_size=layer["intermediate_size"],
            num_attention_heads=layer["num_attention_heads"],
            num_key_value_heads=layer["num_key_value_heads"],
            head_dim=head_dim,
            vocab_size=layer["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
            aux_layers=tuple(_aux(config, layer, spec, found)),
            rope_parameters=rope,
            max_position_embeddings=layer["max_position_embeddings"],
            rms_norm_eps=layer["rms_norm_eps"],
            hidden_act=layer["hidden_act"],
            norm_before_residual=bool(before_residual),
            norm_before_fc=bool(nested.get("norm_before_fc", config.get("norm_before_fc"))),
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
            norm_output=bool(config.get("norm_output")),
        )
    except DraftShapeError as e:
        found.add("error", "config", e.message, e.hint)
        return None


def _aux(config: dict[str, Any], layer: dict[str, Any], spec: TargetSpec | None, found: Findings) -> list[int]:
    """The boundaries the engine captures, or 1, 2, ... as many as fc has inputs, where they cannot be told."""
    nested = (layer.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    inputs = layer.get("num_aux_hidden_states") or len(nested or ()) or 3
    captured = sglang.boundaries(nested, spec) if nested and spec else None
    if top and captured and top != captured:
        message = f"vLLM would capture boundaries {top}, SGLang {captured}"
        hint = "top level: boundaries; eagle_config: the blocks whose output they are, one less"
        found.add("error", "aux_layers", message, hint)
    if top is None:
        found.add("info", "aux_layers", "no aux layers at the top level of config.json: vLLM takes [2, L//2, L-3]")
    aux = top or captured or ([2, spec.num_layers // 2, spec.num_layers - 3] if spec else None)
    if aux and len(aux) != inputs:
        message = f"{len(aux)} aux layers {aux}, but the engine gives fc {inputs} inputs"
        found.add("error", "aux_layers", message, "write num_aux_hidden_states beside the sizes")
    return aux if aux and len(aux) == inputs else list(range(1, inputs + 1))


def _rope(layer: dict[str, Any], found: Findings) -> dict[str, Any] | None:
    """One flat map from either spelling; None where there is no base, which engines then take for 10000."""
    new, old = layer.get("rope_parameters") or {}, layer.get("rope_scaling") or {}
    bases = {float(b) for b in (new.get("rope_theta"), layer.get("rope_theta")) if b is not None}
    if len(bases) != 1:
        message = f"rope_theta is {sorted(bases) or 'missing'}: engines take what they find first, or 10000"
        found.add("error", "rope", message, "write one base, as rope_theta and in rope_parameters")
        return None
    if not new or layer.get("rope_theta") is None:
        message = f"RoPE is written in the {'newer' if new else 'older'} spelling only"
        found.add(
            "warning", "rope", message, "write rope_theta and rope_parameters: servers read one or the other"
        )
    rest = {k: v for k, v in {**old, **new}.items() if k not in ("type", "rope_type", "rope_theta")}
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    return {"rope_type": kind, "rope_theta": bases.pop(), **rest}
