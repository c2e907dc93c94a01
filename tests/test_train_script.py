"""examples/train_script.py, run as a user would, on samples of a tiny target."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.draft import load_draft
from eyas.features.contract import FeatureMeta, Features
from eyas.features.store import StoreWriter
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec, default_aux_layers
from eyas.target.weights import TargetWeights
from tests.tiny import make_target

SCRIPT = Path(__file__).parent.parent / "examples" / "train_script.py"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return Target.load(TargetSpec.load(make_target(tmp_path_factory.mktemp("target"), layers=8)))


def write_samples(folder: Path, target: Target, as_store: bool) -> Path:
    """Ten samples in which a token follows from the one before, so that there is something to learn."""
    spec, aux_layers = target.spec, default_aux_layers(target.spec.num_layers)
    folder.mkdir()
    meta = FeatureMeta(
        target=spec.name,
        target_fingerprint=spec.fingerprint,
        head_fingerprint=TargetWeights(spec).fingerprint(),
        tokenizer_fingerprint="t",
        aux_layers=tuple(aux_layers),
        hidden_size=spec.hidden_size,
        engine="transformers",
        engine_dtype="float32",
    )
    writer = StoreWriter(folder, meta, 50_000) if as_store else None
    for i in range(10):
        ids = (torch.arange(30) * 7 + i * 11) % 60 + 3
        mask = torch.arange(30) >= 8
        states = target.capture([ids.tolist()], aux_layers)[0]
        if writer:
            writer.add(Features.from_states(f"s{i}", ids, mask, states.aux, states.last))
        else:
            layers = [*states.aux.unbind(1), states.last]
            sample = {"input_ids": ids, "loss_mask": mask.long(), "hidden_states": [x.clone() for x in layers]}
            torch.save(sample, folder / f"data_{i}.pt")
    if writer:
        writer.close()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("as_store", [True, False], ids=["store", "files"])
def test_it_learns_and_saves_a_draft_that_loads(target, tmp_path, as_store):
    features = write_samples(tmp_path / "features", target, as_store)
    out = tmp_path / "draft"
    options = {
        "max-len": 128,
        "samples-per-batch": 4,
        "epochs": 12,
        "lr": 3e-3,
        "ttt-steps": 3,
        "draft-vocab-size": 80,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, str(SCRIPT), "--target", str(target.spec.path), "--features", str(features)]
    done = subprocess.run(
        [*command, "--output", str(out), *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]
    assert len(losses) == 36 and sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    assert ("held-out loss" in done.stdout) == (not as_store)
    draft = load_draft(out, TargetWeights(target.spec))
    assert draft.config.draft_vocab_size == 80 and draft.config.aux_layers == (2, 4, 5)
    assert "fc.weight" in load_file(out / "model.safetensors")
