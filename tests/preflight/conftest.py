"""A run whose extract and vocab stages are finished: a tiny real target, texts it sampled, its states."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.features.contract import FeatureMeta, Features
from eyas.features.store import Store, StoreWriter
from eyas.files import write_json
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from eyas.vocab import build_vocab_mapping
from tests.preflight.healthy import make_healthy
from tests.tiny import make_target

AUX = [1, 3, 5]
PROMPT, ANSWER = 6, 30


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("preflight") / "target")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = torch.linspace(
        0.3, 2.0, len(norm)
    )  # a norm of ones would hide that it is missing
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def made(target_folder) -> tuple[FeatureMeta, list[Features]]:
    """Features of ten texts that the target samples at temperature 0.5."""
    spec = TargetSpec.load(target_folder)
    target = Target.load(spec, "float32", "cpu", "eager", False)
    torch.manual_seed(0)
    ids = torch.randint(3, spec.vocab_size, (10, PROMPT))
    with torch.no_grad():
        for _ in range(ANSWER):
            logits = target.model(ids).logits[:, -1] / 0.5
            ids = torch.cat([ids, logits.softmax(-1).multinomial(1)], 1)
    head = TargetWeights(spec).fingerprint()
    meta = FeatureMeta(
        spec.name, spec.fingerprint, head, "", tuple(AUX), spec.hidden_size, "transformers", "float32"
    )
    mask = torch.arange(PROMPT + ANSWER) >= PROMPT
    states = target.capture(ids.tolist(), AUX)
    texts = zip(ids, states, strict=True)
    return meta, [Features.from_states(f"t{i}", x, mask, c.aux, c.last) for i, (x, c) in enumerate(texts)]


Change = Callable[[Features], Features]


@pytest.fixture
def make_run(tmp_path, target_folder, made):
    """make_run(change, meta=..., **sections) writes the run, each sample changed, and returns its config."""

    def make(
        change: Change = lambda f: f, meta: FeatureMeta | None = None, vocab: bool = True, **sections
    ) -> RunConfig:
        base, features = made
        run_dir = tmp_path / "run"
        for split, chosen in (("train", features[:8]), ("heldout", features[8:])):
            writer = StoreWriter(run_dir / "extract" / "features" / split, meta or base, 1 << 20)
            for f in chosen:
                writer.add(change(f))
            writer.close()
        write_json(run_dir / "extract" / "manifest.json", {"stage": "extract"})
        if vocab:
            d2t, t2d = build_vocab_mapping(np.ones(320, np.int64), 200)
            (run_dir / "vocab").mkdir()
            save_numpy({"d2t": d2t, "t2d": t2d}, run_dir / "vocab" / "vocab.safetensors")
            write_json(run_dir / "vocab" / "manifest.json", {"stage": "vocab"})
        raw = {
            "run_dir": str(run_dir),
            "target": {"model": str(target_folder)},
            "extract": {"aux_layers": AUX},
            "train": {"ttt_steps": 3, "batch_tokens": 256, "lr": 1e-3},
            "device": "cpu",
        }
        for name, values in sections.items():
            raw[name] = raw.get(name, {}) | values
        return RunConfig.parse(raw)

    return make


@pytest.fixture
def changed() -> Callable[..., Features]:
    return replace


@pytest.fixture
def store_of() -> Callable[[RunConfig], Store]:
    return lambda config: Store(Path(config.run_dir) / "extract" / "features" / "train")


@pytest.fixture(scope="session")
def healthy(tmp_path_factory) -> RunConfig:
    """A run that is made as far as training, and nothing wrong with it. Not to be changed: see `copy_of`."""
    return make_healthy(tmp_path_factory.mktemp("healthy") / "base")
