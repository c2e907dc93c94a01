"""A tiny real target, its greedy answers and their features in two stores; drafts to train on them."""

import pytest
import torch

from eyas.config import DraftConfig, TrainConfig
from eyas.features.contract import FeatureMeta, Features
from eyas.features.store import StoreWriter
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from tests.tiny import make_target

torch.set_num_threads(1)  # with tensors this small, threads only wait for each other

AUX = [1, 3, 5]
SAMPLES, HELDOUT = 24, 6


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """(spec, weights) of the tiny target."""
    spec = TargetSpec.load(make_target(tmp_path_factory.mktemp("target")))
    return spec, TargetWeights(spec)


@pytest.fixture(scope="session")
def stores(target, tmp_path_factory):
    """(train, heldout): prompts of 4..9 random tokens and 12..40 greedy tokens of the target."""
    from transformers import AutoModelForCausalLM

    spec, weights = target
    model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32)
    last = []
    model.model.layers[-1].register_forward_hook(
        lambda _m, _i, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    meta = FeatureMeta(
        target=spec.name,
        target_fingerprint=spec.fingerprint,
        head_fingerprint=weights.fingerprint(),
        tokenizer_fingerprint="t",
        aux_layers=tuple(AUX),
        hidden_size=spec.hidden_size,
        engine="transformers",
        engine_dtype="float32",
    )
    folder = tmp_path_factory.mktemp("features")
    writers = [StoreWriter(folder / name, meta, shard_bytes=100_000) for name in ("train", "heldout")]
    answered: dict[int, torch.Tensor] = {}
    for extra in range(6):  # prompts of one length are answered together
        chosen = range(extra, SAMPLES + HELDOUT, 6)
        draws = [torch.randint(3, 300, (4 + extra,), generator=torch.Generator().manual_seed(i)) for i in chosen]
        ids = model.generate(torch.stack(draws), max_new_tokens=40, do_sample=False, eos_token_id=None)
        answered |= {i: row[: 4 + extra + 12 + 7 * (i % 5)] for i, row in zip(chosen, ids, strict=True)}
    for i in range(SAMPLES + HELDOUT):
        ids = answered[i]
        last.clear()
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True).hidden_states
        mask = torch.arange(len(ids)) >= 4 + i % 6
        aux = torch.stack([states[j][0] for j in AUX], 1)
        features = Features.from_states(f"s{i}", ids, mask, aux, last[0].reshape(-1, spec.hidden_size))
        writers[i >= SAMPLES].add(features)
    return tuple(w.close() for w in writers)


@pytest.fixture
def new_draft(target):
    """A function that makes the same freshly initialised draft every time."""
    from eyas.draft import Eagle3DraftConfig, Eagle3DraftModel, init_weights

    spec, weights = target

    def make(draft_vocab_size: int = 128, **shape):
        config = Eagle3DraftConfig.from_target(spec, DraftConfig(**shape), AUX, draft_vocab_size)
        if not config.pruned:
            return initialised(Eagle3DraftModel(config))
        kept = torch.arange(draft_vocab_size) * 2
        t2d = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
        return initialised(Eagle3DraftModel(config, t2d, kept - torch.arange(draft_vocab_size)))

    def initialised(model):
        model.load_target(weights)
        init_weights(model, weights, spec)
        return model

    return make


@pytest.fixture
def settings():
    """Eight optimiser steps of a few seconds, with noise, unequal epochs, and checkpoints out of step with
    epochs."""

    def make(**values):
        base = {"ttt_steps": 3, "batch_tokens": 128, "accumulation": 2, "lr": 3e-3, "max_steps": 8, "noise": 0.05}
        return TrainConfig(**(base | {"eval_every": 3, "checkpoint_every": 2, "dtype": "float32"} | values))

    return make
