"""A trained-looking draft of a tiny target, real features, and folders exported from it."""

import json

import pytest
import torch
from safetensors.torch import save_file

from eyas.draft import save_draft
from eyas.export import sglang, vllm
from eyas.features.contract import FeatureMeta, Features
from eyas.features.store import StoreWriter
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from tests.decode.conftest import AUX, make_draft
from tests.tiny import make_target

LAYOUTS = {"vllm": vllm, "sglang": sglang}


@pytest.fixture(scope="session")
def spec(tmp_path_factory):
    return TargetSpec.load(make_target(tmp_path_factory.mktemp("target"), rope_theta=50000.0, layers=8))


@pytest.fixture(scope="session")
def features(spec):
    """States of four samples, as extraction gives them."""
    target, generator = Target.load(spec), torch.Generator().manual_seed(0)
    found = []
    for n in (12, 30, 90, 3):  # the last is too short to compare logits on
        ids = torch.randint(3, 320, (n,), generator=generator)
        states = target.capture([ids.tolist()], AUX)[0]
        found.append(Features.from_states(f"s{n}", ids, torch.ones(n) > 0, states.aux, states.last))
    return found


def trained(spec: TargetSpec, vocab: int = 100, **shape):
    """A draft in which every tensor differs from its initial value."""
    draft = make_draft(spec, "target", vocab, **shape)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in draft.parameters():
            p.mul_(1 + 0.3 * torch.rand(p.shape, generator=generator))
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
    return draft


@pytest.fixture(scope="session")
def draft(spec):
    return trained(spec)


def write_folder(folder, layout: str, draft, spec, change=None, dtype=torch.bfloat16, tensors=None):
    """An exported folder, its config passed through `change`, its tensors updated by `tensors` (None removes)."""
    module = LAYOUTS[layout]
    folder.mkdir(parents=True, exist_ok=True)
    config = module.config(draft.config, spec, str(dtype).removeprefix("torch."), 3)
    if change:
        change(config)
    (folder / "config.json").write_text(json.dumps(config))
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in draft.state_dict().items()}
    named = {n.replace("layers.0.", module.LAYER): t for n, t in state.items()} | (tensors or {})
    save_file({n: t.contiguous() for n, t in named.items() if t is not None}, folder / "model.safetensors")
    return folder


def make_run(folder, spec, draft, features):
    """The stages export reads."""
    weights = TargetWeights(spec)
    save_draft(draft, folder / "train", {"eyas": "0.1.0", "seed": 0, "step": 7})
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
    writer = StoreWriter(folder / "extract" / "features" / "train", meta, 1_000_000)
    for sample in features:
        writer.add(sample)
    writer.close()
    for stage in ("train", "extract"):
        (folder / stage / "manifest.json").write_text("{}")
    return folder
