"""A tiny real target, and features made of random numbers."""

import pytest
import torch

from eyas.features.contract import FeatureMeta, Features
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from tests.tiny import make_target

A, H = 3, 8


@pytest.fixture
def meta() -> FeatureMeta:
    return FeatureMeta(
        target="tiny",
        target_fingerprint="t" * 8,
        head_fingerprint="h" * 8,
        tokenizer_fingerprint="k" * 8,
        aux_layers=(2, 3, 5),
        hidden_size=H,
        engine="by hand",
        engine_dtype="float32",
    )


@pytest.fixture
def make_features():
    """`make(id, tokens)`: random features, about half of the tokens supervised."""

    def make(id: str = "s0", tokens: int = 5) -> Features:
        random = torch.Generator().manual_seed(int.from_bytes(id.encode()) % 2**31)
        mask = torch.rand(tokens, generator=random) < 0.5
        ids = torch.randint(0, 99, (tokens,), generator=random)
        aux, last = (torch.randn(*s, generator=random) for s in ((tokens, A, H), (tokens, H)))
        return Features.from_states(id, ids, mask, aux, last)

    return make


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Target:
    """The tiny random Llama, in float32 on the CPU."""
    return Target.load(TargetSpec.load(make_target(tmp_path_factory.mktemp("target"))))
