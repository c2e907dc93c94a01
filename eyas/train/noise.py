"""Noise on a sample's hidden states: the draft should bear states that are not quite the target's."""

from typing import Any

import torch
from torch import Tensor


class TransformTensors:
    """Apply `transform` to the named tensors of a sample, given back as a new dict. With `std` 0 nothing changes
    and no random number is drawn."""

    def __init__(self, std: float = 0.05, tensors: tuple[str, ...] = ("hidden_states",)):
        if std < 0:
            raise ValueError(f"std must not be negative, got {std}")
        self.std, self.tensors = std, tensors

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        changed = {name: self.transform(data[name]) for name in self.tensors} if self.std else {}
        return {**data, **changed}

    def transform(self, tensor: Tensor) -> Tensor:
        """A changed copy of `tensor`, of the same shape and dtype."""
        raise NotImplementedError("a subclass says what is done to a tensor")


class AddGaussianNoise(TransformTensors):
    """Adds normal noise of standard deviation `std`."""

    def transform(self, tensor: Tensor) -> Tensor:
        return tensor + torch.randn_like(tensor) * self.std


class AddUniformNoise(TransformTensors):
    """Adds noise drawn evenly from [-std, std): `std` is the largest change, not the standard deviation."""

    def transform(self, tensor: Tensor) -> Tensor:
        return tensor + (torch.rand_like(tensor) * 2 - 1) * self.std
