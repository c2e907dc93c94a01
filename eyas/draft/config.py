"""The shape of a draft: everything its tensors and its forward pass depend on."""

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from eyas.errors import EyasError
from eyas.progress import warn

if TYPE_CHECKING:
    from eyas.config import DraftConfig
    from eyas.target.spec import TargetSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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
        aux, rope = self.aux_layers, self.rope_parameters.get("rope_type")
        for name in (f.name for f in fields(self) if f.type is int):
            if getattr(self, name) < 1:
                raise DraftShapeError(f"draft {name} must be at least 1, found {getattr(self, name)}")
        if self.hidden_size != self.target_hidden_size:
            raise DraftShapeError(
                f"draft hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}: "
                "the target's embedding table cannot be shared",
                "give the draft the target's hidden size",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise DraftShapeError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads",
                "num_attention_heads must be a multiple of num_key_value_heads",
            )
        if self.head_dim % 2:
            raise DraftShapeError(f"head_dim {self.head_dim} is odd: RoPE rotates pairs of channels")
        if self.draft_vocab_size > self.vocab_size:
            raise DraftShapeError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the target's vocab_size {self.vocab_size}"
            )
        if not aux or list(aux) != sorted(set(aux)):
            raise DraftShapeError(f"aux_layers must be distinct and ascending, found {list(aux)}")
        if self.norm_before_fc and self.fc_norm:
            raise DraftShapeError("norm_before_fc and fc_norm exclude each other", "choose one of them")
        if rope not in ROPE_TYPES or "rope_theta" not in self.rope_parameters:
            raise DraftShapeError(
                f"rope_parameters {self.rope_parameters} cannot be used in a draft",
                f"rope_theta must be given and rope_type be one of {', '.join(ROPE_TYPES)}",
            )

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
        cls, spec: "TargetSpec", draft: "DraftConfig", aux_layers: list[int], draft_vocab_size: int
    ) -> "Eagle3DraftConfig":
        """The draft of a target: the run's `draft` section where it says something, else the target's shape."""
        rope = dict(spec.rope_parameters)
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if factor and original and factor * original != spec.max_position_embeddings:
            warn(
                f"RoPE factor {factor:g} is kept, though max_position_embeddings "
                f"{spec.max_position_embeddings} / original {original} is {spec.max_position_embeddings / original:g}"
            )
        return cls(
            hidden_size=spec.hidden_size,
            target_hidden_size=spec.hidden_size,
            intermediate_size=draft.intermediate_size or spec.intermediate_size,
            num_attention_heads=draft.num_attention_heads or spec.num_attention_heads,
            num_key_value_heads=draft.num_key_value_heads or spec.num_key_value_heads,
            head_dim=draft.head_dim or spec.head_dim,
            vocab_size=spec.vocab_size,
            draft_vocab_size=min(draft_vocab_size, spec.vocab_size),
            aux_layers=tuple(aux_layers),
            rope_parameters=rope,
            max_position_embeddings=spec.max_position_embeddings,
            rms_norm_eps=spec.rms_norm_eps,
            hidden_act=spec.hidden_act,
            norm_before_residual=draft.norm_before_residual,
            norm_before_fc=draft.norm_before_fc,
            fc_norm=draft.fc_norm,
            norm_output=draft.norm_output,
            train_lm_head=draft.train_lm_head,
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
