"""Facts about a target, read from its folder without building the model."""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from eyas.errors import EyasError, UsageError
from eyas.progress import say
from eyas.target.shards import Shards

# Where models of more than text keep the decoder's own settings.
SUB_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class TargetSpec:
    """The numbers of a target's decoder that the draft and the stages need.

    `rope_parameters` always has `rope_type` and `rope_theta`, whichever spelling the config uses. `head_dim` is a
    value head's width for multi-head latent attention, where the config's own `head_dim` is the rotary part only.
    `fingerprint` is a sha256 over config, tokenizer, chat template, and each shard's name, size, header and tail.
    """

    path: Path
    name: str
    model_type: str
    architectures: list[str]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str
    dtype: str
    eos_token_ids: list[int]
    fingerprint: str

    @classmethod
    def load(cls, model: str | Path, revision: str | None = None) -> "TargetSpec":
        """Read a folder or a hub id (fetched into the hub cache). Raises EyasError naming what is missing."""
        path = _folder(str(model), revision)
        config, shards = _Decoder(path / "config.json"), Shards.open(path)
        config.check_head()
        sizes = (
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        )
        numbers = {key: config.integer(key) for key in sizes}
        heads = numbers["num_attention_heads"]
        latent = config.get("kv_lora_rank") is not None
        tied = config.get("tie_word_embeddings")
        dtype = config.get("dtype") or config.get("torch_dtype") or shards.dtype()
        return cls(
            path=path,
            name=str(model),
            model_type=config.model_type,
            architectures=config.architectures,
            num_layers=config.integer("num_hidden_layers"),
            **numbers,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("v_head_dim" if latent else "head_dim") or numbers["hidden_size"] // heads,
            rms_norm_eps=float(config.need("rms_norm_eps")),
            rope_parameters=config.rope(),
            # Families differ in the default, so the checkpoint decides what the config does not say.
            tie_word_embeddings=bool(tied) if tied is not None else not shards.ending("lm_head.weight"),
            hidden_act=config.get("hidden_activation") or config.need("hidden_act"),
            dtype=str(dtype).removeprefix("torch."),
            eos_token_ids=config.eos(),
            fingerprint=_fingerprint(path, shards),
        )


def default_aux_layers(num_layers: int) -> list[int]:
    """Boundaries [2, L//2, L-3]. Raises UsageError where these collide (fewer than 7 layers)."""
    return check_aux_layers([2, num_layers // 2, num_layers - 3], num_layers)


def check_aux_layers(ids: list[int], num_layers: int) -> list[int]:
    """Return `ids` if they are distinct, ascending boundaries in 0..L; raise UsageError otherwise."""
    if ids and ids[0] >= 0 and ids[-1] <= num_layers and all(a < b for a, b in pairwise(ids)):
        return ids
    fit = f"distinct, ascending boundary ids in 0..{num_layers} (i = the state entering block i)"
    hint = f"set extract.aux_layers, for example to {sorted({1, num_layers // 2, num_layers - 1} - {0})}"
    raise UsageError(f"aux layers {ids} do not fit a target of {num_layers} layers: expected {fit}", hint)


class _Decoder:
    """The decoder's settings: its own sub-config where there is one, the top level for what is not there."""

    def __init__(self, file: Path):
        self.file, self.where = file, "the top level"
        top = sub = _read_json(file)
        while inner := next((k for k in SUB_CONFIGS if isinstance(sub.get(k), dict)), None):
            sub, self.where = sub[inner], f"`{inner}`"
        self.architectures: list[str] = top.get("architectures") or []
        self.get = (top | {k: v for k, v in sub.items() if v is not None}).get
        self.model_type = str(self.get("model_type"))

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            where = f"is missing under {self.where} (model_type {self.model_type})"
            raise EyasError(f"{self.file}: `{key}` {where}", "complete the config from the model's card")
        return value

    def integer(self, key: str) -> int:
        if type(value := self.need(key)) is not int or value < 1:
            raise EyasError(
                f"{self.file}: `{key}` under {self.where} is {value!r}, expected a whole number above 0"
            )
        return value

    def check_head(self) -> None:
        """Refuse targets whose logits are not softmax(lm_head(RMSNorm(x)))."""
        if self.get("rms_norm_eps") is None and (self.get("layer_norm_eps") or self.get("layer_norm_epsilon")):
            found = f"{self.file}: {self.model_type} uses LayerNorm; only RMSNorm targets are supported"
            raise EyasError(found, "choose a target with RMSNorm: a draft's target logits are lm_head(RMSNorm(x))")
        for key in ("logits_scaling", "logit_scale"):
            if self.get(key) not in (None, 1):
                raise EyasError(f"{self.file}: the target scales its logits ({key}), which is not supported")
        if cap := self.get("final_logit_softcapping"):
            _say_once(f"{self.file}: caps its logits at {cap}: the draft learns the uncapped ones (same arg-max)")

    def rope(self) -> dict[str, Any]:
        """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4), as one flat map."""
        found = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if layer_types := [k for k, v in found.items() if isinstance(v, dict)]:
            if "full_attention" not in layer_types:
                found = f"{self.file}: rotary settings for {layer_types}, none for full_attention to follow"
                raise EyasError(found, "complete rope_parameters from the model's card")
            _say_once(f"{self.file}: rotary settings for {layer_types}: the draft takes those of full_attention")
            found = found["full_attention"]
        if (theta := found.get("rope_theta", self.get("rope_theta"))) is None:
            hint = 'a rotary base is never guessed: add "rope_theta" (transformers assumes 10000.0 for most)'
            raise EyasError(f"{self.file}: neither `rope_theta` nor `rope_parameters.rope_theta` is there", hint)
        both = {"rope_type": found.get("type") or "default", **found, "rope_theta": float(theta)}
        return {k: v for k, v in both.items() if k != "type" and v is not None}

    def eos(self) -> list[int]:
        """Ids that end an answer; generation_config.json goes first, as in transformers and vLLM."""
        file = self.file.with_name("generation_config.json")
        ids = _read_json(file).get("eos_token_id") if file.is_file() else None
        ids = self.get("eos_token_id") if ids is None else ids
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


_say_once = lru_cache(maxsize=64)(say)


def _folder(model: str, revision: str | None) -> Path:
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if not model or path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        hint = "set target.model to a model folder or a hub id `org/name`"
        raise UsageError(f"target {model!r} is not a folder", hint)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]
    beside = ["consolidated*", "original/*"]  # the same weights again in their makers' own formats
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=beside))
    except Exception as e:  # the hub client raises a dozen kinds; all mean that the target cannot be had
        hint = "check the name and the network; `hf auth login` for gated models"
        raise EyasError(f"target {model!r} is no folder here and not to be had from the hub: {e!r}", hint) from e


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as e:
        hint = "a target folder holds config.json, tokenizer files and *.safetensors; fetch the model again"
        raise EyasError(f"{path} cannot be read: {e}", hint) from e


def _fingerprint(path: Path, shards: Shards) -> str:
    digest = hashlib.sha256()
    for file in sorted(p for suffix in ("json", "jinja", "model", "txt", "py") for p in path.glob(f"*.{suffix}")):
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for file in shards.files:
        digest.update(f"{file.name} {shards.mark(file)}\n".encode())
    return digest.hexdigest()
