"""The sample contract: what extraction writes, what training reads. Checked on write and on read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.errors import EyasError

PRE_NORM, POST_NORM = "pre_final_norm", "post_final_norm"
AXES = {
    "token_ids": ["token"],
    "loss_mask": ["token"],
    "aux_hidden_states": ["token", "aux_layer", "hidden"],
    "last_hidden_state": ["supervised_token", "hidden"],
}
DTYPES = dict(zip(AXES, (torch.int32, torch.bool, torch.bfloat16, torch.bfloat16), strict=True))


class BadFeatures(EyasError):
    """A sample whose tensors break the contract."""


@dataclass(frozen=True)
class FeatureMeta:
    """What is true of every sample of a store: the head of its `store.json`.

    `target_fingerprint` covers config, tokenizer and weight headers, `head_fingerprint` the bytes of final norm
    and lm_head (they turn a last hidden state into a distribution), `tokenizer_fingerprint` tokenizer files and
    chat template. `aux_layers` are boundary ids, ascending (i = the state entering block i).
    """

    target: str  # as the user wrote it
    target_fingerprint: str
    head_fingerprint: str
    tokenizer_fingerprint: str
    aux_layers: tuple[int, ...]
    hidden_size: int
    engine: str
    engine_dtype: str
    layer_convention: str = "boundary"
    last_hidden_state: str = PRE_NORM  # or POST_NORM: is the final norm still to be applied?
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layers", tuple(self.aux_layers))
        found = (self.layer_convention, self.last_hidden_state, self.dtype)
        if found not in (("boundary", PRE_NORM, "bfloat16"), ("boundary", POST_NORM, "bfloat16")):
            raise EyasError(f"features are {found}, expected boundary layers, {PRE_NORM} or {POST_NORM}, bfloat16")

    def shapes(self, tokens: int, supervised: int) -> dict[str, list[int]]:
        """The shape of each tensor for so many tokens."""
        sizes = {"token": tokens, "supervised_token": supervised}
        sizes |= {"aux_layer": len(self.aux_layers), "hidden": self.hidden_size}
        return {name: [sizes[axis] for axis in axes] for name, axes in AXES.items()}


@dataclass(frozen=True)
class Features:
    """One sample of T tokens, M of them supervised. Row r of `last_hidden_state` is the state *at* the r-th
    supervised token: it gives the target's distribution over the token after it."""

    id: str
    token_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] bool
    aux_hidden_states: Tensor  # [T, A, H] bf16
    last_hidden_state: Tensor  # [M, H] bf16

    @classmethod
    def from_states(cls, id: str, token_ids: Tensor, loss_mask: Tensor, aux: Tensor, last: Tensor) -> "Features":
        """Round a target's states `aux` [T, A, H] and `last` [T, H] to bf16, in memory of their own, and keep the
        supervised last rows. Raises BadFeatures when rows and tokens differ in number."""
        found = {"loss_mask": len(loss_mask), "aux_hidden_states": len(aux), "last_hidden_state": len(last)}
        if set(found.values()) != {len(token_ids)}:
            raise BadFeatures(f"sample {id} has {len(token_ids)} tokens, but rows: {found}")
        mask = loss_mask.bool()
        return cls(id, token_ids.int(), mask, aux.to(torch.bfloat16, copy=True), last[mask].to(torch.bfloat16))

    def validate(self, meta: FeatureMeta, where: str = "") -> "Features":
        """Check shapes, dtypes and values. Raises BadFeatures naming sample, tensor, layer and token."""
        at = f"{where}sample {self.id}"
        for name, shape in meta.shapes(self.token_ids.numel(), int(self.loss_mask.sum())).items():
            found, wanted = (list(getattr(self, name).shape), getattr(self, name).dtype), (shape, DTYPES[name])
            if found != wanted:
                raise BadFeatures(f"{at}: {name} is {found}, expected {wanted} (axes {', '.join(AXES[name])})")
        hint = "float16 overflows in many targets: try target.dtype bfloat16 or float32"
        for column, layer in enumerate(meta.aux_layers):  # lowest first: there a fault begins
            if fault := bad_row(self.aux_hidden_states[:, column]):
                raise BadFeatures(f"{at}: aux_hidden_states of layer {layer} at token {fault[0]} {fault[1]}", hint)
        if fault := bad_row(self.last_hidden_state):
            token = int(self.loss_mask.nonzero()[fault[0]])
            raise BadFeatures(f"{at}: last_hidden_state at token {token} {fault[1]}", hint)
        return self


def bad_row(states: Tensor) -> tuple[int, str] | None:
    """The first row of [rows, H] that holds NaN or infinity or only zeros, and what is wrong with it.

    Read as integers, bf16 magnitudes keep their order, infinity (0x7F80) and NaN on top: far faster than isfinite.
    """
    peak = (states.view(torch.int16) & 0x7FFF).amax(-1)  # [rows]
    for row in ((peak >= 0x7F80) | (peak == 0)).nonzero()[:1].flatten().tolist():
        return row, {0: "is all zeros", 0x7F80: "is infinite in bfloat16"}.get(int(peak[row]), "is NaN")
    return None
