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

TABLES = {"d2t": torch.int64, "t2d": torch.bool}
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

    def error(self, check: str, message: str, hint: str = "", **evidence: Any) -> None:
        self.add("error", check, message, hint, **evidence)

    def warning(self, check: str, message: str, hint: str = "", **evidence: Any) -> None:
        self.add("warning", check, message, hint, **evidence)

    @property
    def ok(self) -> bool:
        return not any(f["level"] == "error" for f in self.items)


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """config.json and its layout: vllm (speculators), sglang (SGLang, SpecForge) or raw (the authors' own).

    Raises ValueError for anything else.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} cannot be read: {e}") from e
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
            raise ValueError(f"{file} ({file.stat().st_size} bytes) cannot be read: {e!r:.200}") from e
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
    layer = config.get("transformer_layer_config") if layout == "vllm" else config
    layer = layer if isinstance(layer, dict) else {}
    _engine_keys(config, layer, layout, found)
    rope = _rope(layer, found)
    if missing := [key for key in SIZES if layer.get(key) is None]:
        where = "transformer_layer_config" if layout == "vllm" else "config.json"
        found.error("config", f"{where} lacks {', '.join(missing)}", "write every value out")
    if missing or rope is None:
        return None
    head_dim = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    if layer.get("head_dim") is None:
        found.warning("config", f"head_dim is not written; engines divide and get {head_dim}")
    before_residual = config.get("norm_before_residual")
    if before_residual is None and layout == "vllm":
        before_residual = True
        found.warning("flags", "norm_before_residual is not written: true to vLLM, false to all others")
    nested = config.get("eagle_config") or {}
    try:
        return Eagle3DraftConfig(
            **{key: layer[key] for key in SIZES},
            target_hidden_size=config.get("target_hidden_size") or layer["hidden_size"],
            head_dim=head_dim,
            draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
            aux_layers=tuple(_aux(config, layer, spec, found)),
            rope_parameters=rope,
            norm_before_residual=bool(before_residual),
            norm_before_fc=bool(nested.get("norm_before_fc", config.get("norm_before_fc"))),
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
            norm_output=bool(config.get("norm_output")),
        )
    except DraftShapeError as e:
        found.error("config", e.message, e.hint)
        return None


def _engine_keys(config: dict[str, Any], layer: dict[str, Any], layout: str, found: Findings) -> None:
    """Keys beside the sizes that decide how, or whether, the engine serves the folder."""
    faults = {
        "tie_word_embeddings is true: the head would be the embedding table": layer.get("tie_word_embeddings"),
        "hidden_act is not silu, the only one the engines' drafts know": layer.get("hidden_act", "silu") != "silu",
        "num_hidden_layers is not 1: only such drafts can be verified": layer.get("num_hidden_layers", 1) != 1,
        "attention_bias is true: SGLang drops the biases, eyas drafts have none": layer.get("attention_bias"),
    }
    if layout == "vllm":
        own = config["speculators_config"] or {}
        proposal, verifier = (own.get("proposal_methods") or [{}])[0], own.get("verifier") or {}
        faults |= {
            "speculators_model_type is not eagle3": config.get("speculators_model_type") != "eagle3",
            "proposal_methods[0].speculative_tokens is missing": not proposal.get("speculative_tokens"),
            "verifier.name_or_path, the model vLLM would serve, is missing": not verifier.get("name_or_path"),
            "transformer_layer_config.model_type is not llama": layer.get("model_type", "llama") != "llama",
        }
    else:
        unused = (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False
        null = "target_hidden_size" in config and config["target_hidden_size"] is None
        faults |= {
            "draft_vocab_size is missing: SGLang stops there": "draft_vocab_size" not in config,
            "target_hidden_size is null: engines test whether it is there": null,
            "eagle_config.use_aux_hidden_state is false: fc would not be used": unused,
            "norm_before_residual is true: SGLang serves it as false": config.get("norm_before_residual"),
        }
        if layout == "raw":
            found.warning("config", "architectures: SGLang wants LlamaForCausalLMEagle3; only vLLM takes this one")
        if config.get("norm_output"):
            found.add("info", "flags", "norm_output: engines feed the post-norm state back, SpecForge does not")
    for message in (m for m, wrong in faults.items() if wrong):
        found.error("config", message)


def _aux(config: dict[str, Any], layer: dict[str, Any], spec: TargetSpec | None, found: Findings) -> list[int]:
    """The boundaries the engine captures, or 1, 2, ... as many as fc has inputs, where they cannot be told."""
    nested = (layer.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    inputs = layer.get("num_aux_hidden_states") or len(nested or ()) or 3
    captured = sglang.boundaries(nested, spec) if nested and spec else None
    if top and captured and top != captured:
        hint = "top level: boundaries; eagle_config: the blocks whose output they are, one less"
        found.error("aux_layers", f"vLLM would capture boundaries {top}, SGLang {captured}", hint)
    if top is None:
        found.add("info", "aux_layers", "no aux layers at the top level of config.json: vLLM takes [2, L//2, L-3]")
    aux = top or captured or ([2, spec.num_layers // 2, spec.num_layers - 3] if spec else None)
    if aux and len(aux) != inputs:
        hint = "write num_aux_hidden_states beside the sizes"
        found.error("aux_layers", f"{len(aux)} aux layers {aux}, but the engine gives fc {inputs} inputs", hint)
    return aux if aux and len(aux) == inputs else list(range(1, inputs + 1))


def _rope(layer: dict[str, Any], found: Findings) -> dict[str, Any] | None:
    """One flat map from either spelling; None where there is no base, which engines then take for 10000."""
    new, old = layer.get("rope_parameters") or {}, layer.get("rope_scaling") or {}
    bases = {float(b) for b in (new.get("rope_theta"), layer.get("rope_theta")) if b is not None}
    hint = "write rope_theta and rope_parameters: servers read one or the other"
    if len(bases) != 1:
        seen = sorted(bases) or "missing"
        found.error("rope", f"rope_theta is {seen}: engines take what they find first, or 10000", hint)
        return None
    if not new or layer.get("rope_theta") is None:
        found.warning("rope", f"RoPE is written in the {'newer' if new else 'older'} spelling only", hint)
    rest = {k: v for k, v in {**old, **new}.items() if k not in ("type", "rope_type", "rope_theta")}
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    return {"rope_type": kind, "rope_theta": bases.pop(), **rest}
