"""The train stage: from features and a draft vocabulary to `model.safetensors` + `draft.json`, the best draft."""

from pathlib import Path
from typing import Any

import torch

from eyas import __version__
from eyas.config import RunConfig
from eyas.draft import Eagle3DraftConfig, Eagle3DraftModel, init_weights
from eyas.errors import EyasError
from eyas.features.contract import PRE_NORM
from eyas.features.store import Store
from eyas.pipeline import Context
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from eyas.train.loop import fit
from eyas.vocab import read_vocab_mapping


def run(ctx: Context) -> dict[str, Any]:
    """Stage: train on the features of `extract` with the vocabulary of `vocab` (see `fit` for what it leaves)."""
    config = ctx.config
    spec = TargetSpec.load(config.target.model, config.target.revision)
    weights = TargetWeights(spec)
    data, heldout = (Store(ctx.input("extract") / "features" / split) for split in ("train", "heldout"))
    same = {"target_fingerprint": spec.fingerprint, "head_fingerprint": weights.fingerprint()}
    for store in (data, heldout):
        store.check(**same, last_hidden_state=PRE_NORM)
    model = new_draft(config, spec, list(data.meta.aux_layers), ctx.input("vocab"))
    model.load_target(weights)
    initial = init_weights(model, weights, spec, config.draft.init, config.seed)
    model.to(config.torch_device())
    origin = {"eyas": __version__, "target": spec.name, "seed": config.seed}
    origin["target_fingerprint"] = spec.fingerprint
    result = fit(model, data, heldout, config.train, ctx.out, config.seed, origin)
    return {**result, "init": initial}


def new_draft(config: RunConfig, spec: TargetSpec, aux_layers: list[int], vocab: Path) -> Eagle3DraftModel:
    """The run's draft as torch makes it, with the tables in `vocab`, the folder of the finished stage."""
    found = read_vocab_mapping(vocab, spec.vocab_size)
    if not found and config.vocab.size < spec.vocab_size:
        needs = f"vocab.size {config.vocab.size} of the target's {spec.vocab_size} needs it"
        raise EyasError(f"{vocab / 'vocab.safetensors'} is missing: {needs}", "make it with `eyas vocab`")
    d2t, t2d = map(torch.from_numpy, found) if found else (None, None)
    size = spec.vocab_size if d2t is None else len(d2t)
    return Eagle3DraftModel(Eagle3DraftConfig.from_target(spec, config.draft, aux_layers, size), t2d, d2t)
