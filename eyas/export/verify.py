"""verify: would this folder be served as it was trained? By the rules of the engine its layout is for.

Both engines are silent about what matters: a missing tensor is uninitialised memory in both, SGLang passes
over names it does not know, and a config key left out takes a default that differs between them.
"""

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
from eyas.export.reader import Findings, read_config, read_shape, read_tensors
from eyas.features.contract import Features
from eyas.features.store import Store
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from eyas.vocab import check_vocab_mapping

TOLERANCE = 1e-5  # of the largest logit, in float32
ROWS, CHAIN = 64, 2  # verified rows and chain rows compared in each sample
TABLES = {"d2t": torch.int64, "t2d": torch.bool}


def verify(folder: str | Path, run_dir: str | Path | None = None, target: str | None = None) -> dict[str, Any]:
    """Check a draft folder, made here or elsewhere: {"ok", "format", "findings", "proof"}.

    `target` (folder or hub id) adds the checks against the target's config; `run_dir` those against the run
    that trained the draft: every tensor, and logits on real features. Raises UsageError for a path that is no
    folder.
    """
    path = Path(folder)
    if "://" in str(folder) or not path.is_dir():
        raise UsageError(f"draft {str(folder)!r} is not a folder", "give a local folder: config.json and weights")
    if run_dir is None:
        return check(path, TargetSpec.load(target) if target else None)
    run, config = Path(run_dir), RunConfig.load(Path(run_dir) / "run.yaml").target
    spec = TargetSpec.load(target or config.model, config.revision)
    return check(path, spec, load_draft(run / "train", TargetWeights(spec)), samples(run / "extract"))


def samples(extract: Path, count: int = 4) -> list[Features]:
    """A few samples, evenly spaced over the training store."""
    store = Store(extract / "features" / "train")
    return [store[i * len(store) // count] for i in range(min(count, len(store)))]


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
        tensors = read_tensors(folder, layout, found)
        _keys(config, layout, found)
        _values(tensors, found)
        shape = read_shape(config, layout, spec, found)
        if shape:
            _names(tensors, shape, layout, found)
            _vocabulary(tensors, shape, found)
            if spec:
                _target(shape, spec, found)
            if trained and features and found.ok:
                proof = _prove(tensors, shape, trained, features, found)
    except ValueError as e:
        found.add("error", "files", str(e))
    return {"ok": found.ok, "format": layout, "findings": found.items, "proof": proof}


def _keys(config: dict[str, Any], layout: str, found: Findings) -> None:
    """Keys beside the shape that decide how, or whether, the engine serves the folder."""
    own = config.get("speculators_config") or {}
    layer = config.get("transformer_layer_config") if layout == "vllm" else config
    layer = layer if isinstance(layer, dict) else {}
    method = (own.get("proposal_methods") or [{}])[0]
    faults = {
        "tie_word_embeddings is true: the head would be the embedding table": layer.get("tie_word_embeddings"),
        f"hidden_act {layer.get('hidden_act')}: the engines' drafts know silu": layer.get("hidden_act", "silu")
        != "silu",
    }
    if layout == "vllm":
        verifier = (own.get("verifier") or {}).get("name_or_path")
        faults |= {
            "speculators_model_type is not eagle3": config.get("speculators_model_type") != "eagle3",
            "speculators_config.proposal_methods[0].speculative_tokens is missing": not method.get(
                "speculative_tokens"
            ),
            "speculators_config.verifier.name_or_path is missing: the model vLLM serves": not verifier,
            "transformer_layer_config.model_type is not llama": layer.get("model_type", "llama") != "llama",
        }
    else:
        nulls = config.get("target_hidden_size", 0) is None
        unused = (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False
        faults |= {
            "draft_vocab_size is missing: SGLang stops with an attribute error": "draft_vocab_size" not in config,
            "target_hidden_size is null: engines test whether it is there; leave it out": nulls,
            "eagle_config.use_aux_hidden_state is false: fc would not be used": unused,
            "attention_bias is true: SGLang drops the biases of q, k and v": layer.get("attention_bias"),
        }
        if config.get("norm_output"):
            message = "norm_output is true: engines feed the post-norm state back; SpecForge means something else"
            found.add("info", "flags", message)
    for message in (m for m, wrong in faults.items() if wrong):
        found.add("error", "config", message)
    if layout == "raw":
        found.add("warning", "config", "architectures is LlamaForCausalLM: SGLang wants LlamaForCausalLMEagle3")
    if layer.get("num_hidden_layers", 1) != 1:
        found.add("error", "config", f"{layer['num_hidden_layers']} layers; only one-layer drafts can be verified")


def _names(tensors: dict[str, Tensor], shape: Eagle3DraftConfig, layout: str, found: Findings) -> None:
    """Every tensor the engine looks for is there, in its shape and type, and nothing it would refuse or pass over."""
    with torch.device("meta"):  # the full vocabulary needs no tables, and its head is the only other difference
        whole = Eagle3DraftModel(replace(shape, draft_vocab_size=shape.vocab_size)).state_dict()
    expected = {n: list(t.shape) for n, t in whole.items()}
    expected["lm_head.weight"] = [shape.draft_vocab_size, shape.hidden_size]
    if shape.pruned:
        expected |= {"d2t": [shape.draft_vocab_size], "t2d": [shape.vocab_size]}
    allowed = expected | {"embed_tokens.weight": [shape.vocab_size, shape.hidden_size]}
    for name in sorted(expected.keys() - tensors.keys() - {"t2d"}):
        found.add("error", "names", f"{name} {expected[name]} is missing: the engine serves uninitialised memory")
    for name in sorted(tensors.keys() - allowed.keys()):
        changes = layout != "sglang" or name in TABLES or name.endswith(("q_norm.weight", "k_norm.weight", "bias"))
        message = f"{name} is not part of this draft: vLLM refuses it, SGLang passes over it"
        found.add("error" if changes else "warning", "names", message, shape=list(tensors[name].shape))
    for name in sorted(tensors.keys() & allowed.keys()):
        if list(tensors[name].shape) != allowed[name]:
            found.add("error", "shapes", f"{name}: expected {allowed[name]}, found {list(tensors[name].shape)}")
        if tensors[name].dtype != TABLES.get(name, tensors[name].dtype):
            found.add("error", "dtypes", f"{name}: expected {TABLES[name]}, found {tensors[name].dtype}")
    kinds = {str(t.dtype) for n, t in tensors.items() if n not in TABLES}
    if len(kinds) > 1 or not kinds <= {"torch.float32", "torch.bfloat16", "torch.float16"}:
        found.add("warning", "dtypes", f"weights are stored as {', '.join(sorted(kinds))}")


def _values(tensors: dict[str, Tensor], found: Findings) -> None:
    """Numbers that no training leaves behind."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = (float(x) for x in torch.aminmax(tensor.float()))
        if bad := int((~torch.isfinite(tensor)).sum()):
            found.add("error", "values", f"{name} has {bad} values that are NaN or infinite")
        elif low == high == 0:
            vital = name in ("fc.weight", "norm.weight", "lm_head.weight")  # zero, they make all tokens equal
            found.add("error" if vital else "warning", "values", f"{name} is all zero")
        elif low == high and tensor.dim() > 1:
            found.add("warning", "values", f"{name} is {low} everywhere: never trained?")


def _vocabulary(tensors: dict[str, Tensor], shape: Eagle3DraftConfig, found: Findings) -> None:
    """d2t and t2d are one mapping of offsets."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if not shape.pruned or d2t is None:
        return
    if t2d is None:
        found.add("info", "vocabulary", "t2d is not there; servers do not need it, training tools do")
        targets = (torch.arange(len(d2t)) + d2t).clamp(0, shape.vocab_size - 1)
        t2d = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, targets, True)
    try:
        check_vocab_mapping(d2t, t2d, shape.vocab_size)
    except EyasError as e:
        absolute = torch.equal(torch.nonzero(t2d).flatten(), d2t)
        found.add(
            "error",
            "vocabulary",
            e.message,
            "d2t holds ids, not offsets: subtract 0, 1, ..." if absolute else e.hint,
        )


def _target(shape: Eagle3DraftConfig, spec: TargetSpec, found: Findings) -> None:
    """The draft fits the target."""
    for key, own, theirs in (
        ("vocab_size", shape.vocab_size, spec.vocab_size),
        ("target_hidden_size", shape.target_hidden_size, spec.hidden_size),
    ):
        if own != theirs:
            found.add("error", "target", f"{key} is {own}, the target's is {theirs}")
    if shape.max_position_embeddings < spec.max_position_embeddings:
        message = f"max_position_embeddings is {shape.max_position_embeddings}, the target's "
        found.add(
            "warning", "target", f"{message}{spec.max_position_embeddings}: older vLLM fails on longer prompts"
        )
    if shape.aux_layers[-1] > spec.num_layers:
        found.add("error", "target", f"aux layers {list(shape.aux_layers)} exceed {spec.num_layers} layers")
    own, theirs = shape.rope_parameters["rope_theta"], spec.rope_parameters["rope_theta"]
    if own != theirs:
        found.add("warning", "target", f"rope_theta is {own}, the target's {theirs}: right only if trained so")


@torch.no_grad()
def _prove(
    tensors: dict[str, Tensor],
    shape: Eagle3DraftConfig,
    trained: Eagle3DraftModel,
    features: list[Features],
    found: Findings,
) -> dict[str, Any]:
    """A draft built from the folder alone gives the logits of the trained one rounded to the stored dtype.

    Both compute in float32, on a first pass over real features and the chain after it.
    """
    dtype = tensors["fc.weight"].dtype
    own = {n: t.to(dtype) if t.is_floating_point() else t for n, t in trained.state_dict().items()}
    for name in sorted(n for n in own if n not in tensors or not torch.equal(own[n], tensors[n])):
        found.add("error", "proof", f"{name} is not the trained tensor rounded to {dtype}")
    if shape.aux_layers != trained.config.aux_layers:
        layers = f"{list(shape.aux_layers)}, the draft was trained on {list(trained.config.aux_layers)}"
        found.add("error", "proof", f"the engine captures boundaries {layers}")
    worst = compared = 0
    models = []
    for config, state in ((shape, tensors), (trained.config, own)):
        model = Eagle3DraftModel(config, trained.t2d, state.get("d2t"))
        model.load_state_dict({n: state.get(n, t) for n, t in model.state_dict().items()})
        model.embed_tokens = trained.embed_tokens
        models.append(model)
    for sample in features:
        if (rows := min(ROWS, len(sample.token_ids) - 1 - CHAIN)) > 0:
            got, wanted = (_logits(model, sample, rows) for model in models)  # [1 + CHAIN, Vd]
            worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
            compared += len(wanted)
    if not worst <= TOLERANCE:
        message = f"logits differ from the trained draft's by {worst:.1e} of the largest, tolerance {TOLERANCE}"
        found.add("error", "proof", message, "some flag does not mean to the engine what it meant in training")
    return {"largest_difference": worst, "tolerance": TOLERANCE, "rows": compared}


def _logits(model: Eagle3DraftModel, sample: Features, rows: int) -> Tensor:
    """Logits [1 + CHAIN, Vd] after `rows` verified positions and along the chain of the stored tokens."""
    ids, cache = sample.token_ids[1 : 1 + rows + CHAIN].long(), model.new_cache(rows + CHAIN)
    logits, state = model.decode_step(model.fuse(sample.aux_hidden_states[:rows].flatten(1)), ids[:rows], cache)
    out = [logits]
    for token in ids[rows:, None]:
        logits, state = model.decode_step(state[None], token, cache)
        out.append(logits)
    return torch.stack(out)
