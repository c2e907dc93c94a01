"""The few tensors of a target that a draft shares, read straight from the shards: the model is never built."""

import hashlib
import json
from functools import cached_property

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.progress import warn
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
            near = self.shards.ending("norm.weight")[-4:] + self.shards.ending("embed_tokens.weight")
            raise EyasError(
                f"{self.spec.path}: expected one decoder with `{last}` and `norm.weight`, found "
                f"{found or 'none'}; close names: {', '.join(near) or 'none'}",
                f"{self.spec.architectures} ({self.spec.model_type}) has tensor names that eyas does not know",
            )
        return found[0]

    def find(self, suffix: str) -> Tensor:
        """The decoder's tensor of that name, or the only one ending so. Raises EyasError listing close names."""
        matches = self.shards.ending(suffix)
        if self.prefix + suffix not in matches and len(matches) > 1:
            raise EyasError(f"{self.spec.path}: {suffix!r} is ambiguous: {', '.join(matches[:6])}")
        return self.shards.read(matches[0] if len(matches) == 1 else self.prefix + suffix)

    def embed_tokens(self) -> Tensor:
        """[V, H]"""
        only_head = self.spec.tie_word_embeddings and not self.shards.ending("embed_tokens.weight")
        return self._of_shape("lm_head.weight" if only_head else "embed_tokens.weight", self.spec.vocab_size)

    def lm_head(self) -> Tensor:
        """[V, H]; the embedding where the two are tied. A stored head wins over the config, as in transformers."""
        self._check_logits()
        if self.shards.ending("lm_head.weight"):
            return self._of_shape("lm_head.weight", self.spec.vocab_size)
        if not self.spec.tie_word_embeddings:
            raise EyasError(
                f"{self.spec.path}: no tensor ends with lm_head.weight, and tie_word_embeddings is false",
                "fetch the missing shard; or, if the head is the embedding, say so in config.json",
            )
        return self.embed_tokens()

    def final_norm(self) -> FinalNorm:
        """The norm between the last block and lm_head."""
        if f"{self.prefix}norm.bias" in self.shards.where:
            raise EyasError(f"{self.spec.path}: the final norm has a bias (LayerNorm); only RMSNorm is supported")
        return FinalNorm(self._of_shape("norm.weight"), self.spec.rms_norm_eps, flavour_of(self.spec.model_type))

    def layer(self, index: int) -> dict[str, Tensor]:
        """Tensors of block `index` by short name ("self_attn.q_proj.weight", ...), without routed experts.

        A quantised checkpoint gives its quantised tensors and their scales, as stored.
        """
        start = f"{self.prefix}layers.{index}."
        names = sorted(k for k in self.shards.where if k.startswith(start) and ".experts." not in k)
        if not names:
            raise EyasError(f"{self.spec.path}: no tensor starts with {start!r} ({self.spec.num_layers} layers)")
        return {k.removeprefix(start): self.shards.read(k) for k in names}

    def fingerprint(self) -> str:
        """sha256 of the final norm's and lm_head's bytes: what turns a last hidden state into a distribution."""
        digest = hashlib.sha256()
        for tensor in (self.final_norm().weight, self.lm_head()):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _of_shape(self, suffix: str, *leading: int) -> Tensor:
        tensor, expected = self.find(suffix), (*leading, self.spec.hidden_size)
        if tuple(tensor.shape) != expected:
            found = list(tensor.shape)
            raise EyasError(f"{self.spec.path}: {suffix} is {found}, config.json says {list(expected)}")
        return tensor

    def _check_logits(self) -> None:
        """Some families bend their logits after lm_head: theirs is not softmax(lm_head(norm(x)))."""
        top = json.loads((self.spec.path / "config.json").read_text())
        config = top | (top.get("text_config") or {})
        for key in ("logits_scaling", "logit_scale"):
            if config.get(key, 1) != 1:
                raise EyasError(f"{self.spec.path}: the target scales its logits ({key}), which is not supported")
        if cap := config.get("final_logit_softcapping"):
            warn(f"{self.spec.name} caps its logits at {cap}: the draft learns the uncapped ones (same arg-max)")
