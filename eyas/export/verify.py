"""verify: would this folder be served as it was trained? By the rules of the engine its layout is for.

Both engines are silent about what matters: a missing tensor is uninitialised memory in both, SGLang passes over
names it does not know, and a config key left out takes a default that differs between them.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.config import RunConfig
from eyas.draft.config import Eagle3DraftConfig
from eyas.draft.io import load_draft
from eyas.draft.model import Eagle3DraftModel
from eyas.errors import EyasError, UsageError
from eyas.export import sglang
from eyas.export.reader import Findings, read_config, read_shape, read_tensors
from eyas.features.contract import Features
from eyas.features.store import Store
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from eyas.vocab import check_vocab_mapping

TOLERANCE = 1e-5  # of the largest logit, in float32
SAMPLES, ROWS, CHAIN = 4, 64, 2  # samples compared; in each, verified rows and chain rows


def verify(folder: str | Path, run_dir: str | Path | None = None, target: str | None = None) -> dict[str, Any]:
    """Check a draft folder, made here or elsewhere: {"ok", "format", "findings", "proof"}.

    `target` (folder or hub id) adds the checks against the target's config; `run_dir` those against the run that
    trained the draft: every tensor, and logits on real features. Raises UsageError for a path that is no folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"draft {str(folder)!r} is not a folder", "give a local folder: config.json and weights")
    if run_dir is None:
        return check(path, TargetSpec.load(target) if target else None)
    run = Path(run_dir)
    own = RunConfig.load(run / "run.yaml").target
    spec = TargetSpec.load(target or own.model, own.revision)
    return check(path, spec, load_draft(run / "train", TargetWeights(spec)), samples(run / "extract"))


def samples(extract: Path) -> list[Features]:
    """A few samples, evenly spaced over the training store."""
    return Store(extract / "features" / "train").spread(SAMPLES)


def check(
    folder: Path,
    spec: TargetSpec | None = None,
    trained: Eagle3DraftModel | None = None,
    features: list[Features] | None = None,
) -> dict[str, Any]:
    """`verify` on opened things; with `trained` and `features` the folder must give the trained draft's logits."""
    found, layout, proof = Findings(), None, None
    try:
        config, layout = read_config(folder)
        tensors = read_tensors(folder)
        _values(tensors, found)
        if shape := read_shape(config, layout, spec, found):
            _tensors(tensors, shape, found)
            _types(tensors, config, found)
            if spec:
                _target(shape, spec, layout, found)
                _embedding(tensors, spec, found)
            elif "embed_tokens.weight" in tensors:
                message = "embed_tokens.weight is in the folder: engines take it in place of the target's"
                found.add("warning", "names", message, "name the target, and it is compared")
            if trained and features is not None and not found.messages("error"):
                proof = _prove(tensors, shape, trained, features, found)
    except ValueError as e:
        found.add("error", "files", str(e))
    except (TypeError, AttributeError, KeyError, NotImplementedError) as e:
        message = f"{folder}: config.json or a tensor holds a value of a type that no engine reads: {e}"
        found.add("error", "config", message, "compare it with a folder that `eyas export` makes")
    return {"ok": not found.messages("error"), "format": layout, "findings": found, "proof": proof}


def _tensors(tensors: dict[str, Tensor], shape: Eagle3DraftConfig, found: Findings) -> None:
    """The tensors are those of this draft, each in its shape and type; d2t and t2d are one mapping of offsets."""
    with torch.device("meta"):  # made with the full vocabulary, which needs no tables
        whole = Eagle3DraftModel(replace(shape, draft_vocab_size=shape.vocab_size)).state_dict()
    expected = {n: list(t.shape) for n, t in whole.items()}
    expected["lm_head.weight"] = [shape.draft_vocab_size, shape.hidden_size]
    if shape.pruned:
        expected |= {"d2t": [shape.draft_vocab_size], "t2d": [shape.vocab_size]}
    allowed = expected | {"embed_tokens.weight": [shape.vocab_size, shape.hidden_size]}
    for name in sorted(expected.keys() - tensors.keys()):
        found.add("error", "names", f"{name} {expected[name]} is missing: engines serve uninitialised memory")
    for name in sorted(tensors.keys() - allowed.keys()):
        found.add("error", "names", f"{name} is not part of this draft: vLLM refuses it, SGLang passes over it")
    for name in sorted(tensors.keys() & allowed.keys()):
        if (size := list(tensors[name].shape)) != allowed[name]:
            found.add("error", "shapes", f"{name}: expected {allowed[name]}, found {size}")
    if shape.pruned and {"d2t", "t2d"} <= tensors.keys():
        try:
            check_vocab_mapping(tensors["d2t"], tensors["t2d"], shape.vocab_size)
        except EyasError as e:
            absolute = tensors["t2d"].flatten().nonzero().flatten().tolist() == tensors["d2t"].tolist()
            hint = "these are ids, not offsets: subtract 0, 1, ..." if absolute else e.hint
            found.add("error", "vocabulary", e.message, hint)


def _types(tensors: dict[str, Tensor], config: dict[str, Any], found: Findings) -> None:
    """Weights in one floating type, the one that config.json names; d2t int64, t2d bool."""
    tables = {"d2t": torch.int64, "t2d": torch.bool}
    kinds = {t.dtype for name, t in tensors.items() if name not in tables}
    for name, wanted in tables.items():
        if name in tensors and tensors[name].dtype != wanted:
            found.add("error", "dtypes", f"{name} is {tensors[name].dtype}, expected {wanted}")
    if len(kinds) > 1 or kinds - {torch.bfloat16, torch.float16, torch.float32}:
        found.add(
            "error", "dtypes", f"weights are {sorted(map(str, kinds))}, expected one of float32, bfloat16, float16"
        )
    elif (said := config.get("dtype") or config.get("torch_dtype")) and {f"torch.{said}"} != {*map(str, kinds)}:
        found.add("warning", "dtypes", f"config.json says {said}, the weights are {kinds.pop()}")


def _embedding(tensors: dict[str, Tensor], spec: TargetSpec, found: Findings) -> None:
    """An embedding in the folder, which engines take in place of the target's, must be the target's."""
    if (own := tensors.get("embed_tokens.weight")) is None:
        return
    theirs = TargetWeights(spec).embed_tokens()
    if own.shape != theirs.shape or not torch.equal(own, theirs.to(own.dtype)):
        message = "embed_tokens.weight is not the target's, and engines take it in place of the target's"
        found.add("error", "target", message, "leave it out of the folder")


def _values(tensors: dict[str, Tensor], found: Findings) -> None:
    """Numbers that no training leaves behind."""
    for name, tensor in tensors.items():
        if bad := int((~torch.isfinite(tensor)).sum()):
            found.add("error", "values", f"{name} has {bad} values that are NaN or infinite")
        elif name in ("fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight") and not tensor.any():
            found.add("error", "values", f"{name} is all zero, which no training leaves behind")


def _target(shape: Eagle3DraftConfig, spec: TargetSpec, layout: str, found: Findings) -> None:
    """The draft fits the target, and its engine can capture the aux layers."""
    own, theirs = ({**vars(s), **s.rope_parameters} for s in (shape, spec))
    for key in ("vocab_size", "hidden_size", "rope_theta", "max_position_embeddings"):
        if own[key] < theirs[key] or (own[key] != theirs[key] and key != "max_position_embeddings"):
            level = "error" if key in ("vocab_size", "hidden_size") else "warning"
            found.add(level, "target", f"{key} is {own[key]}, the target's {theirs[key]}")
    if (aux := list(shape.aux_layers))[-1] > spec.num_layers:
        found.add("error", "target", f"aux layers {aux} exceed the target's {spec.num_layers} layers")
    elif layout == "sglang":
        try:
            sglang.check(shape, spec)
        except EyasError as e:
            found.add("error", "target", e.message, e.hint)


@torch.no_grad()
def _prove(
    tensors: dict[str, Tensor],
    shape: Eagle3DraftConfig,
    trained: Eagle3DraftModel,
    features: list[Features],
    found: Findings,
) -> dict[str, Any] | None:
    """A draft built from the folder alone gives the logits of the trained one rounded to the stored dtype.

    Both compute in float32, on a first pass over real features and the chain after it.
    """
    own, dtype = trained.config, tensors["fc.weight"].dtype
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in trained.state_dict().items()}
    for name, tensor in rounded.items():
        if name not in tensors or not torch.equal(tensor, tensors[name]):
            found.add("error", "proof", f"{name} is not the trained tensor rounded to {dtype}")
    if (aux := list(shape.aux_layers)) != (wanted := list(own.aux_layers)):
        message = f"the engine captures boundaries {aux}, the draft was trained on {wanted}"
        found.add("error", "proof", message)
    if found.messages("error"):
        return None
    models = []
    for config, state in ((shape, tensors), (own, rounded)):
        models.append(model := Eagle3DraftModel(config, state.get("t2d"), state.get("d2t")))
        model.load_state_dict({n: t for n, t in state.items() if n != "embed_tokens.weight"})
        model.embed_tokens = trained.embed_tokens
    worst, compared = 0.0, 0
    for sample in features:
        if (rows := min(ROWS, len(sample.token_ids) - 1 - CHAIN)) > 0:
            got, wanted = (_logits(model, sample, rows) for model in models)  # [1 + CHAIN, Vd]
            difference = float((got - wanted).abs().max() / wanted.abs().max())
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
            compared += len(wanted)
    if not compared:
        found.add("warning", "proof", "the samples are too short: tensors are equal, but no logits were compared")
    if not worst <= TOLERANCE:
        message = f"logits differ from the trained draft's by {worst:.1e} of the largest, tolerance {TOLERANCE}"
        found.add("error", "proof", message, "some flag does not mean to the engine what it meant in training")
    worst = worst if math.isfinite(worst) else None  # JSON has no infinity; the finding says it
    return {"largest_difference": worst, "tolerance": TOLERANCE, "rows": compared}


def _logits(model: Eagle3DraftModel, sample: Features, rows: int) -> Tensor:
    """Logits [1 + CHAIN, Vd] after `rows` verified positions and along the chain of the stored tokens."""
    ids, cache = sample.token_ids[1 : 1 + rows + CHAIN].long(), model.new_cache(rows + CHAIN)
    hidden, given, out = model.fuse(sample.aux_hidden_states[:rows].flatten(1)), ids[:rows], []
    for k in range(1 + CHAIN):
        logits, state = model.decode_step(hidden, given, cache)
        hidden, given = state[None], ids[rows + k : rows + k + 1]
        out.append(logits)
    return torch.stack(out)
