"""Tiny real targets, and drafts: random, made from the target, or one that repeats the last token."""

import pytest
import torch

from eyas.config import DraftConfig
from eyas.draft import Eagle3DraftConfig, Eagle3DraftModel, init_weights
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from tests.tiny import make_target

AUX = [2, 4, 6]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folder of the tiny target of a seed, made once."""
    made = {}

    def folder(seed: int):
        if seed not in made:
            # this range makes answers that repeat themselves in part, so that rounds accept 0 to n tokens
            made[seed] = make_target(tmp_path_factory.mktemp("target"), seed=seed, initializer_range=0.15)
        return made[seed]

    return folder


@pytest.fixture(scope="session")
def target(folders):
    return Target.load(TargetSpec.load(folders(2)))


def make_draft(spec: TargetSpec, kind: str, vocab: int = 320, **shape) -> Eagle3DraftModel:
    """A draft over the `vocab` highest ids. `repeat` passes boundary L through to the target's norm and head: it
    drafts what the target said last, which is right wherever an answer says one token over and over.
    """
    weights = TargetWeights(spec)
    config = Eagle3DraftConfig.from_target(spec, DraftConfig(**shape), AUX, vocab)
    kept = torch.arange(spec.vocab_size)[-vocab:]
    tables = (None, None)
    if config.pruned:
        t2d = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
        tables = (t2d, kept - torch.arange(vocab))
    model = Eagle3DraftModel(config, *tables)
    model.load_target(weights)
    init_weights(model, weights, spec, "random" if kind == "random" else "target", seed=1)
    if kind == "repeat":
        with torch.no_grad():
            model.fc.weight.zero_()[:, -spec.hidden_size :] = torch.eye(spec.hidden_size)
            model.layers[0].self_attn.o_proj.weight.zero_()
            model.layers[0].mlp.down_proj.weight.zero_()
            model.norm.weight.copy_(weights.final_norm().weight)
    return model.eval()
