"""The few tensors of a target that a draft shares, read straight from the shards: the model is never built."""

import hashlib
from functools import cached_property

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.target.norm import FinalNorm, flavour_of
from eyas.target.shards import Shards
from eyas.target.spec import TargetSpec


class TargetWeights:
    """Tensors as stored (their own dtype, CPU), whatever prefix the architecture gives its decoder."""

    def __init__(self, spec: TargetSpec):
        self.spec, self.shards = spec, Shards.open(spec.path)

    @cached_property
    def prefix(self) -> str:
        """What stands before `layers.0.` in the decoder's names: "model.", "model.language_model.", ..."""
        names, last = self.shards.where, f"layers.{self.spec.num_layers - 1}."
        # A vision tower may have as many blocks, but no `norm.weight` right behind them.
        ends = {k.split(last)[0] for k in names if k.startswith(last) or f".{last}" in k}
        found = [p for p in sorted(ends) if f"{p}norm.weight" in names]
        if len(found) != 1:
            near = ", ".join(self.shards.ending("norm.weight")[-4:] + self.shards.ending("embed_tokens.weight"))
            wanted = f"one decoder with `{last}` and `norm.weight`, found {found or 'none'}"
            raise EyasError(f"{self.spec.path}: expected {wanted}; close names: {near or 'none'}")
        return found[0]

    def find(self, suffix: str, *leading: int) -> Tensor:
        """The decoder's tensor of that name, or the only one ending so; [*leading, H], else EyasError."""
        matches, own = self.shards.ending(suffix), self.prefix + suffix
        tensor = self.shards.read(matches[0] if len(matches) == 1 else own)
        if (found := list(tensor.shape)) != (expected := [*leading, self.spec.hidden_size]):
            raise EyasError(f"{self.spec.path}: {suffix} is {found}, config.json says {expected}")
        return tensor

    def embed_tokens(self) -> Tensor:
        """[V, H]"""
        only_head = self.spec.tie_word_embeddings and not self.shards.ending("embed_tokens.weight")
        return self.find("lm_head.weight" if only_head else "embed_tokens.weight", self.spec.vocab_size)

    def lm_head(self) -> Tensor:
        """[V, H]; the embedding where the two are tied. A stored head wins over the config, as in transformers."""
        if self.shards.ending("lm_head.weight"):
            return self.find("lm_head.weight", self.spec.vocab_size)
        if not self.spec.tie_word_embeddings:
            found = "no tensor ends with lm_head.weight, and tie_word_embeddings is false"
            raise EyasError(f"{self.spec.path}: {found}", "fetch the missing shard, or correct config.json")
        return self.embed_tokens()

    def final_norm(self) -> FinalNorm:
        """The norm between the last block and lm_head."""
        return FinalNorm(self.find("norm.weight"), self.spec.rms_norm_eps, flavour_of(self.spec.model_type))

    def layer(self, index: int) -> dict[str, Tensor]:
        """Tensors of block `index` by short name ("self_attn.q_proj.weight", ...), without routed experts.

        A quantised checkpoint gives its quantised tensors and their scales, as stored.
        """
        start = f"{self.prefix}layers.{index}."
        names = sorted(k for k in self.shards.where if k.startswith(start) and ".experts." not in k)
        return {k.removeprefix(start): self.shards.read(k) for k in names}

    def fingerprint(self) -> str:
        """sha256 of the final norm's and lm_head's bytes: what turns a last hidden state into a distribution."""
        digest = hashlib.sha256()
        for tensor in (self.final_norm().weight, self.lm_head()):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()
