"""The shape of a draft: everything its tensors and its forward pass depend on."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from eyas.config import DraftConfig
from eyas.errors import EyasError
from eyas.progress import say, warn
from eyas.target.spec import TargetSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class DraftShapeError(EyasError, ValueError):
    """Sizes of a draft, its vocabulary tables, its inputs or its target that do not fit together."""


@dataclass(frozen=True)
class Eagle3DraftConfig:
    """One Llama-style EAGLE-3 layer over the aux states of a target.

    hidden_size H: width of the draft, equal to `target_hidden_size` (the embedding table is the target's);
    vocab_size V: target ids (inputs); draft_vocab_size Vd: ids it can propose, Vd = V without pruning;
    aux_layers: boundary ids in ascending order (i = the state entering block i), A of them;
    rope_parameters: always with `rope_type` and `rope_theta`; max_position_embeddings: the target's.

    Raises DraftShapeError for values that contradict each other.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_lm_head: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layers", tuple(self.aux_layers))
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.type is int}
        h, target, size = self.hidden_size, self.target_hidden_size, self.draft_vocab_size
        heads, shared, aux = self.num_attention_heads, self.num_key_value_heads, list(self.aux_layers)
        rope, kinds = self.rope_parameters, ", ".join(ROPE_TYPES)
        faults = [(n < 1, f"draft {name} must be at least 1, found {n}", "") for name, n in sizes.items()]
        faults += [
            (h != target, f"hidden_size {h} differs from the target's {target}: its embedding cannot be shared",
             "a draft is as wide as its target"),
            (shared and heads % shared, f"{heads} query heads cannot share {shared} key/value heads evenly",
             "set draft.num_key_value_heads to a divisor of draft.num_attention_heads"),
            (not self.rms_norm_eps > 0, f"rms_norm_eps must be above 0, found {self.rms_norm_eps}",
             "the target's is in its config.json"),
            (self.head_dim % 2, f"head_dim {self.head_dim} is odd: RoPE rotates pairs of channels",
             "set draft.head_dim to an even number"),
            (size > self.vocab_size, f"draft_vocab_size {size} exceeds the target's vocab_size {self.vocab_size}",
             "set vocab.size to the target's or less"),
            (not aux or aux != sorted({*aux}), f"aux_layers must be distinct and ascending, found {aux}", ""),
            (self.norm_before_fc and self.fc_norm, "norm_before_fc and fc_norm exclude each other",
             "set draft.norm_before_fc or draft.fc_norm, not both"),
            (self.hidden_act != "silu", f"hidden_act {self.hidden_act!r}: servers' drafts know silu only", ""),
            ("rope_theta" not in rope, f"rope_parameters {rope}: rope_theta must be given", ""),
            (rope.get("rope_type") not in ROPE_TYPES, f"rope_parameters {rope}: let rope_type be one of {kinds}",
             "a draft rotates as its target does: choose a target with one of these in rope_parameters"),
        ]  # fmt: skip
        for wrong, message, hint in faults:
            if wrong:
                raise DraftShapeError(message, hint)

    @property
    def num_aux(self) -> int:
        """A: how many aux states fc reads."""
        return len(self.aux_layers)

    @property
    def pruned(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's (d2t and t2d are needed)."""
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def from_target(
        cls, spec: TargetSpec, draft: DraftConfig, aux_layers: list[int], draft_vocab_size: int
    ) -> "Eagle3DraftConfig":
        """The draft of a target: the run's `draft` section where it says something, else the target's shape."""
        rope, longest = dict(spec.rope_parameters), spec.max_position_embeddings
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if factor and original and factor * original != longest:
            found = f"max_position_embeddings {longest} over the original {original} is {longest / original:g}"
            warn(f"RoPE factor {factor:g} is kept, though {found}")
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            say("the target rotates a part of each head only; servers' drafts, and so this one, rotate all of it")
        if spec.hidden_act != "silu":
            say(f"the target's MLP uses {spec.hidden_act}; servers' drafts know silu only, and the draft uses it")
        own = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        shared = ("hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps")
        return cls(
            target_hidden_size=spec.hidden_size,
            draft_vocab_size=min(draft_vocab_size, spec.vocab_size),
            aux_layers=tuple(aux_layers),
            rope_parameters=rope,
            **{key: getattr(spec, key) for key in shared},
            **{key: getattr(draft, key) or getattr(spec, key) for key in own},
            **{key: getattr(draft, key) for key in (*FLAGS, "train_lm_head")},
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` of it gives an equal object."""
        return asdict(self) | {"aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Eagle3DraftConfig":
        """Raises DraftShapeError naming unknown and missing keys."""
        known = {f.name for f in fields(cls)}
        unknown, missing = sorted(value.keys() - known), sorted(known - value.keys())
        if unknown or missing:
            raise DraftShapeError(f"draft config: unknown keys {unknown}, missing keys {missing}")
        return cls(**value)
