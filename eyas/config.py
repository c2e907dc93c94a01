"""RunConfig: the one YAML of a run. Every key is also a flag (`--train.lr 3e-4`) and is documented here, once.

Unknown keys, misplaced keys and wrong types are errors that name the dotted path and the nearest valid key.
Precedence: flag > file > default. The resolved config is written to `run.yaml` and reads back unchanged.
"""

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eyas.errors import UsageError


class Section(BaseModel):
    """No unknown keys; the docstring below a field is its help."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class TargetConfig(Section):
    """The model to be made faster."""

    model: str = ""
    """Hugging Face id or folder of the target."""
    revision: str | None = None
    """Branch, tag or commit on the hub; ignored for a folder."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision the target runs in; auto: the checkpoint's own on a GPU, float32 on a CPU."""
    attention: str = "sdpa"
    """Attention implementation handed to transformers (sdpa, eager, flash_attention_2, ...)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target. Off unless you have read that code."""


class DataConfig(Section):
    """Conversations to learn from."""

    sources: list[str] = []
    """JSONL, JSON or Parquet files (globs allowed) or hub dataset ids, with `messages` or `conversations`."""
    limit: int | None = Field(default=None, ge=1)
    """Take at most this many good rows, in order."""
    max_length: int = Field(default=2048, ge=2)
    """Longest sample in tokens; longer ones are cut at the end and counted."""
    heldout: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of conversations kept from training, chosen by a hash of the first user turn."""
    supervise: Literal["all_turns", "last_turn"] = "all_turns"
    """Which assistant turns the loss is taken on."""


class RegenerateConfig(Section):
    """Let the target answer the prompts itself: a draft must learn what the target says, not what people wrote."""

    mode: Literal["none", "missing", "all"] = "none"
    """none: keep the answers; missing: answer rows that end with a user turn; all: answer every assistant turn."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Longest answer in tokens."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus of the sampling distribution; 1 keeps all of it."""
    batch_size: int = Field(default=32, ge=1)
    """Prompts answered together (sorted by length)."""


class ExtractConfig(Section):
    """Run the target once over every sample and keep the hidden states that the draft reads."""

    aux_layers: list[int] | None = None
    """Boundary ids (i = the state entering block i), ascending; default [2, L//2, L-3]."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Token budget of one forward pass, padding included."""
    shard_mb: int = Field(default=1024, ge=1)
    """Size of one shard of the feature store, in MB."""
    on_bad: Literal["stop", "skip"] = "stop"
    """What NaN, infinite or all-zero states do: stop the run, or skip the sample and count it."""


class VocabConfig(Section):
    """The draft vocabulary: the target's ids most frequent among supervised tokens."""

    size: int = Field(default=32000, ge=1)
    """Draft vocabulary size Vd; the target's vocabulary size or more means no pruning."""


class DraftConfig(Section):
    """The draft's shape; what is left out follows the target."""

    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; default the target's (its dense width for MoE targets)."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads; default the target's."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key/value heads; default the target's."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of a head; default the target's."""
    norm_before_residual: bool = False
    """Residual branch carries hidden_norm(g) (vLLM only; SGLang cannot serve it)."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated aux states before fc."""
    fc_norm: bool = False
    """One RMSNorm for each aux state before fc (EAGLE-3.1)."""
    norm_output: bool = False
    """Feed the post-norm state to the next step (EAGLE-3.1)."""
    init: Literal["target", "random"] = "target"
    """Initial weights: from the target's last layer where shapes agree, or random."""
    train_lm_head: bool = False
    """Train the draft's lm_head too (it starts as the target's rows either way)."""


class TrainConfig(Section):
    """Training-time test (TTT) on stored features."""

    ttt_steps: int = Field(default=7, ge=1, le=16)
    """Unrolled steps K."""
    ttt_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of step k is ttt_decay**k; weights are normalised to sum 1."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the training samples."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimiser steps, whatever `epochs` says."""
    batch_tokens: int = Field(default=8192, ge=2)
    """Tokens packed into one micro-batch."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches in one optimiser step, those of all processes together."""
    lr: float = Field(default=1e-4, gt=0.0)
    """Peak learning rate."""
    warmup: float = Field(default=0.02, ge=0.0, le=1.0)
    """Share of all optimiser steps spent warming up."""
    min_lr: float = Field(default=0.05, ge=0.0, le=1.0)
    """Last learning rate as a share of the peak (cosine in between)."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay of matrices (norms have none)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments."""
    grad_clip: float = Field(default=1.0, ge=0.0)
    """Largest gradient norm; 0 does not clip."""
    noise: float = Field(default=0.0, ge=0.0)
    """Standard deviation of Gaussian noise on the aux states, relative to each state's RMS."""
    eval_every: int | None = Field(default=None, ge=1)
    """Optimiser steps between held-out evaluations; default once an epoch."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Optimiser steps between checkpoints; default once an epoch."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept besides the best."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix products; weights and optimiser stay float32. auto: bfloat16 on a GPU."""


class EvaluateConfig(Section):
    """Lossless speculative decoding with the reference engine."""

    heldout_prompts: int = Field(default=40, ge=0)
    """Held-out conversations whose first user turn is decoded."""
    prompts: list[str] = []
    """More prompt files (same formats as data.sources), reported apart."""
    limit: int | None = Field(default=None, ge=1)
    """At most this many prompts from each file, spread over its categories."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Tokens decoded for each prompt."""
    draft_tokens: int = Field(default=3, ge=1, le=16)
    """Tokens drafted in a round (a chain)."""
    timed_prompts: int = Field(default=8, ge=0)
    """Prompts of each set whose plain decoding is timed alone; the plain answers of the others come in batches."""
    batch_size: int = Field(default=16, ge=1)
    """Prompts decoded plainly together."""


class ExportConfig(Section):
    """The checkpoint that servers load."""

    layouts: list[Literal["vllm", "sglang"]] = ["vllm", "sglang"]
    """vllm: the speculators layout; sglang: `LlamaForCausalLMEagle3` with midlayer names."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Stored precision of the weights."""


class PreflightConfig(Section):
    """Checks made before training."""

    samples: int = Field(default=8, ge=1)
    """Samples looked at."""
    steps: int = Field(default=3, ge=1)
    """Optimiser steps of the dry run."""


class RunConfig(Section):
    """Everything that decides what a run makes."""

    run_dir: str = Field(default="runs/default", min_length=1)
    """Where the run is kept."""
    seed: int = Field(default=0, ge=0)
    """Seed of every random choice."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the target and the draft run; auto: the GPU if there is one."""
    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    extract: ExtractConfig = ExtractConfig()
    vocab: VocabConfig = VocabConfig()
    draft: DraftConfig = DraftConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    preflight: PreflightConfig = PreflightConfig()

    @field_validator("run_dir")
    @classmethod
    def _run_dir_is_local(cls, value: str) -> str:
        if "://" in value:
            raise ValueError("run_dir must be a local folder, not a URL")
        return value

    @classmethod
    def load(cls, path: str | Path) -> "RunConfig":
        """Read a YAML config. Raises UsageError naming file, line or dotted key, and the nearest valid key."""
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"config file {path} does not exist", "pass the path of a YAML file")
        try:
            raw = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)
        except UnicodeDecodeError as e:
            raise UsageError(f"{path} is not UTF-8 text: {e}") from e
        except yaml.YAMLError as e:
            mark = getattr(e, "problem_mark", None)
            where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise UsageError(f"{path}: not valid YAML{where}: {getattr(e, 'problem', e)}") from e
        if raw is None:
            raw = {}
        if not isinstance(raw, dict):
            raise UsageError(f"{path}: expected a mapping of sections, got {type(raw).__name__}")
        return cls.parse(raw, source=str(path))

    @classmethod
    def parse(cls, raw: dict[str, Any], source: str = "config") -> "RunConfig":
        """Validate a plain mapping. Raises UsageError listing every fault."""
        try:
            return cls.model_validate(raw)
        except ValidationError as e:
            raise UsageError("\n".join(f"{source}: {_fault(err)}" for err in e.errors())) from e

    def to_yaml(self) -> str:
        """The resolved config; `RunConfig.load` of it gives an equal object."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def torch_device(self) -> str:
        """The device name torch should use, with `auto` resolved."""
        import torch

        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device: cuda was asked for but torch sees no GPU", "use --device cpu or auto")
        return self.device


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as a string, where a number is meant, and lets a key's second value win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if twice := next((key for key, _ in node.value if names.count(key.value) > 1), None):
            raise yaml.constructor.ConstructorError(
                None, None, f"key {twice.value!r} stands twice", twice.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every dotted key with its pydantic FieldInfo, in order."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def nearest(key: str) -> str:
    """A hint naming the valid keys closest to `key`: same last part in another section first."""
    known = list(keys())
    last = key.rsplit(".", 1)[-1].replace("-", "_")
    same = [k for k in known if k.rsplit(".", 1)[-1] == last]
    by_last = {k: k.rsplit(".", 1)[-1] for k in known}
    close_last = difflib.get_close_matches(last, by_last.values(), n=2, cutoff=0.7)
    close = same + difflib.get_close_matches(key.replace("-", "_"), known, n=2, cutoff=0.7)
    close = list(dict.fromkeys(close or [k for k, v in by_last.items() if v in close_last]))
    return f"; did you mean {' or '.join(close[:3])}?" if close else "; see `eyas config explain`"


def _fault(err: Any) -> str:
    key = ".".join(str(p) for p in err["loc"])
    got = err.get("input")
    if err["type"] == "extra_forbidden":
        return f"unknown key '{key}'{nearest(key)}"
    kinds = {"float_parsing": "a number", "float_type": "a number", "int_parsing": "a whole number"}
    kinds |= {"int_type": "a whole number", "int_from_float": "a whole number", "string_type": "a string"}
    kinds |= {"bool_parsing": "true or false", "bool_type": "true or false", "list_type": "a list"}
    if err["type"] in kinds:
        return f"{key}: expected {kinds[err['type']]}, got {got!r}"
    return f"{key}: {err['msg'].removeprefix('Value error, ')}, got {got!r}"
