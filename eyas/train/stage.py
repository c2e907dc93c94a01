"""The train stage: from features and a draft vocabulary to `model.safetensors` + `draft.json`, the best draft."""

from typing import Any

from safetensors.torch import load_file

from eyas import __version__
from eyas.draft import Eagle3DraftConfig, Eagle3DraftModel, init_weights
from eyas.errors import EyasError
from eyas.features.contract import PRE_NORM
from eyas.features.store import Store
from eyas.pipeline import Context
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from eyas.train.loop import fit


def run(ctx: Context) -> dict[str, Any]:
    """Stage: train on the features of `extract` with the vocabulary of `vocab` (see `fit` for what it leaves)."""
    config = ctx.config
    spec = TargetSpec.load(config.target.model, config.target.revision)
    weights = TargetWeights(spec)
    data, heldout = (Store(ctx.input("extract") / "features" / split) for split in ("train", "heldout"))
    for store in (data, heldout):
        store.check(
            target_fingerprint=spec.fingerprint, head_fingerprint=weights.fingerprint(), last_hidden_state=PRE_NORM
        )
    tables_file = ctx.input("vocab") / "vocab.safetensors"
    tables = load_file(tables_file) if tables_file.is_file() else {}
    size = len(tables["d2t"]) if tables else spec.vocab_size
    if not tables and config.vocab.size < spec.vocab_size:
        raise EyasError(
            f"{tables_file} is missing: vocab.size {config.vocab.size} of the target's {spec.vocab_size} needs it",
            "make it with `eyas vocab`",
        )
    shape = Eagle3DraftConfig.from_target(spec, config.draft, list(data.meta.aux_layers), size)
    model = Eagle3DraftModel(shape, tables.get("t2d"), tables.get("d2t"))
    model.load_target(weights)
    initial = init_weights(model, weights, spec, config.draft.init, config.seed)
    model.to(config.torch_device())
    provenance = {
        "eyas": __version__,
        "target": spec.name,
        "target_fingerprint": spec.fingerprint,
        "seed": config.seed,
    }
    result = fit(model, data, heldout, config.train, ctx.out, config.seed, provenance)
    return {**result, "init": initial}
