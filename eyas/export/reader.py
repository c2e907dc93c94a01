"""A draft folder as the engines read it: their defaults, what they refuse and what they pass over."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.draft.config import FLAGS, DraftShapeError, Eagle3DraftConfig
from eyas.export import sglang, vllm
from eyas.target.spec import TargetSpec

Config = dict[str, Any]
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
SIZES += ("max_position_embeddings", "rms_norm_eps", "hidden_act")


class Findings(list[dict[str, Any]]):
    """What there is to say about a folder, in the form of the preflight's findings."""

    def add(self, level: str, check: str, message: str, hint: str = "") -> None:
        self.append({"check": check, "level": level, "message": message, "hint": hint, "evidence": {}})

    def messages(self, level: str) -> list[str]:
        return [f["message"] for f in self if f["level"] == level]


def read_config(folder: Path) -> tuple[Config, str]:
    """config.json and its layout: vllm, sglang, or raw (the EAGLE authors'). Raises ValueError for any other."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"{path} cannot be read: {e}") from e
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}, expected an object")
    architectures = config.get("architectures") or []
    if "speculators_config" in config:
        return config, "vllm"
    if architectures == ["LlamaForCausalLMEagle3"]:
        return config, "sglang"
    if architectures == ["LlamaForCausalLM"] and "draft_vocab_size" in config:
        return config, "raw"
    raise ValueError(f"{path} is of no EAGLE-3 layout known here (architectures {architectures})")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's weight files, by the speculators layout's names. Raises ValueError."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model.bin"))
    if not files:
        raise ValueError(f"{folder} has neither *.safetensors nor pytorch_model.bin")
    tensors: dict[str, Tensor] = {}
    for file in files:
        pickled = file.suffix == ".bin"
        try:
            tensors |= torch.load(file, "cpu", weights_only=True) if pickled else load_file(file)
        except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError, struct.error, OSError) as e:
            raise ValueError(f"{file} ({file.stat().st_size} bytes) cannot be read: {e!r:.200}") from e
    return {name.replace(sglang.LAYER, vllm.LAYER): tensor for name, tensor in tensors.items()}


def read_shape(config: Config, layout: str, spec: TargetSpec | None, found: Findings) -> Eagle3DraftConfig | None:
    """The draft that the engine would build from config.json; None where it cannot be told. Adds findings."""
    where, layer = "config.json", config
    flags: Config = {flag: bool(config.get(flag)) for flag in FLAGS}
    if layout == "vllm":
        where = "transformer_layer_config"
        layer = config.get(where) or {}
        if config.get("norm_before_residual") is None:
            flags["norm_before_residual"] = True
            found.add("warning", "flags", "norm_before_residual is not written: true to vLLM, false to all others")
    for fault in _faults(config, layer, layout):
        found.add("error", "config", fault)
    if layout == "raw":
        found.add("warning", "config", "SGLang wants LlamaForCausalLMEagle3 here; only vLLM takes the folder")
    rope = _rope(layer, found)
    if missing := [key for key in SIZES if layer.get(key) is None]:
        found.add("error", "config", f"{where} lacks {', '.join(missing)}", "write every value out")
    if missing or rope is None:
        return None
    if (head_dim := layer.get("head_dim")) is None:
        head_dim = layer["hidden_size"] // layer["num_attention_heads"]
        found.add("warning", "config", f"head_dim is not written; engines divide and get {head_dim}")
    try:
        return Eagle3DraftConfig(
            **{key: layer[key] for key in SIZES},
            **flags,
            target_hidden_size=config.get("target_hidden_size") or layer["hidden_size"],
            head_dim=head_dim,
            draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
            aux_layers=tuple(_aux(config, layer, spec, found)),
            rope_parameters=rope,
        )
    except DraftShapeError as e:
        found.add("error", "config", e.message, e.hint)


def _faults(config: Config, layer: Config, layout: str) -> list[str]:
    """What is wrong with keys beside the sizes that decide how, or whether, the engine serves the folder."""
    faults = {
        "tie_word_embeddings is true: the head would be the embedding table": layer.get("tie_word_embeddings"),
        "attention_bias is true: the folder has no biases": layer.get("attention_bias"),
        "mlp_bias is true: the folder has no biases": layer.get("mlp_bias"),
        "num_hidden_layers is not 1: only such drafts can be verified": layer.get("num_hidden_layers", 1) != 1,
    }
    if layout == "vllm":
        own = config["speculators_config"] or {}
        proposal, verifier = (own.get("proposal_methods") or [{}])[0], own.get("verifier") or {}
        faults |= {
            "speculators_model_type is not eagle3": config.get("speculators_model_type") != "eagle3",
            "proposal_methods[0].speculative_tokens is no number above 0": not (
                isinstance(proposal.get("speculative_tokens"), int) and proposal["speculative_tokens"] > 0
            ),
            "verifier.name_or_path, the model vLLM would serve, is missing": not verifier.get("name_or_path"),
        }
    else:
        unused = (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False
        null = config.get("target_hidden_size", 0) is None
        faults |= {
            "draft_vocab_size is missing: SGLang stops there": "draft_vocab_size" not in config,
            "target_hidden_size is null: engines test whether it is there": null,
            "eagle_config.use_aux_hidden_state is false: fc would not be used": unused,
            "norm_before_residual is true: SGLang serves it as false": config.get("norm_before_residual"),
        }
    return [message for message, wrong in faults.items() if wrong]


def _aux(config: Config, layer: Config, spec: TargetSpec | None, found: Findings) -> list[int]:
    """The boundaries the engine captures, or 1, 2, ... as many as fc has inputs, where they cannot be told."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    captured = sglang.boundaries(nested, spec) if nested and spec else None
    if top and captured and top != captured:
        hint = "top level: boundaries; eagle_config: the blocks whose output they are, one less"
        found.add("error", "aux_layers", f"vLLM would capture boundaries {top}, SGLang {captured}", hint)
    inputs = layer.get("num_aux_hidden_states") or len(nested or ()) or 3
    default = [2, spec.num_layers // 2, spec.num_layers - 3] if spec else list(range(1, inputs + 1))
    if len(aux := top or captured or default) != inputs:
        hint = "write num_aux_hidden_states beside the sizes"
        found.add(
            "error", "aux_layers", f"the aux layers are {aux}, but the engine gives fc {inputs} inputs", hint
        )
    return aux


def _rope(layer: Config, found: Findings) -> Config | None:
    """One flat map from either spelling; None where there is no base, which engines then take for 10000."""
    new, old = layer.get("rope_parameters") or {}, layer.get("rope_scaling") or {}
    bases = {float(b) for b in (new.get("rope_theta"), layer.get("rope_theta")) if b is not None}
    hint = "write rope_theta and rope_parameters: servers read one or the other"
    if len(bases) != 1:
        seen = sorted(bases) or "missing"
        found.add("error", "rope", f"rope_theta is {seen}: engines take what they find first, or 10000", hint)
        return None
    if not new or layer.get("rope_theta") is None:
        found.add("warning", "rope", f"RoPE is written in the {'newer' if new else 'older'} spelling only", hint)
    both = {"rope_type": old.get("type", "default"), **old, **new, "rope_theta": bases.pop()}
    return {k: v for k, v in both.items() if k != "type"}
