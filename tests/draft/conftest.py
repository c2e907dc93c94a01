"""A tiny real target and drafts of every variant for it."""

import pytest
import torch

from eyas.config import DraftConfig
from eyas.draft import Eagle3DraftConfig, Eagle3DraftModel, init_weights
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from eyas.vocab import build_vocab_mappings_from_distribution
from tests.draft.reference import Document
from tests.tiny import make_target

AUX = [1, 3, 5]


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """(spec, weights) of a random Llama: H 32, 4/2 heads of 8, V 320."""
    spec = TargetSpec.load(make_target(tmp_path_factory.mktemp("target")))
    return spec, TargetWeights(spec)


@pytest.fixture
def make_draft(target):
    """make_draft(vocab=64, dtype=..., **draft settings) -> a float64 draft with random weights."""
    spec, weights = target

    def make(vocab: int = 64, dtype: torch.dtype = torch.float64, seed: int = 0, **settings) -> Eagle3DraftModel:
        config = Eagle3DraftConfig.from_target(spec, DraftConfig(**settings), AUX, vocab)
        tables = ()
        if config.pruned:
            d2t, t2d = build_vocab_mappings_from_distribution(dict.fromkeys(range(0, 320, 5), 1), vocab, 320)
            tables = (t2d, d2t)
        model = Eagle3DraftModel(config, *tables)
        model.load_target(weights)
        init_weights(model, weights, spec, "random", seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1:
                    p.uniform_(0.5, 1.5, generator=generator)
                elif name != "lm_head.weight":
                    p.normal_(0, 0.2, generator=generator)
        return model.to(dtype)

    return make


@pytest.fixture
def make_documents():
    """make_documents([mask, ...], seed) -> documents of these masks with random tokens and states."""

    def make(masks: list[list[bool]], seed: int = 0) -> list[Document]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        return [
            Document(
                torch.randint(0, 320, (len(mask),), generator=generator),
                normal(len(mask), 96) * torch.tensor([1.0, 3.0, 10.0]).double().repeat_interleave(32),
                normal(len(mask), 32) * 3,
                torch.tensor(mask),
            )
            for mask in masks
        ]

    return make
