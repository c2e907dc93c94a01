import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from eyas.config import RunConfig
from eyas.draft import load_draft
from eyas.errors import EyasError
from eyas.pipeline import Context
from eyas.train.stage import run
from tests.tiny import make_target


@pytest.fixture
def context(target, stores, tmp_path):
    """A run whose extract and vocab stages are finished, and nothing of train is there."""
    for split, store in zip(("train", "heldout"), stores, strict=True):
        shutil.copytree(store.folder, tmp_path / "extract" / "features" / split)
    (tmp_path / "vocab").mkdir()
    kept = torch.arange(160) * 2
    t2d = torch.zeros(320, dtype=torch.bool).index_fill_(0, kept, True)
    save_file({"d2t": kept - torch.arange(160), "t2d": t2d}, tmp_path / "vocab" / "vocab.safetensors")
    for stage in ("extract", "vocab"):
        (tmp_path / stage / "manifest.json").write_text("{}")
    train = {"ttt_steps": 3, "batch_tokens": 256, "max_steps": 2, "dtype": "float32"}
    raw = {"device": "cpu", "target": {"model": str(target[0].path)}, "vocab": {"size": 160}, "train": train}
    return Context(RunConfig.parse(raw), tmp_path, tmp_path / "train.partial")


def test_the_stage_leaves_a_draft_that_loads_and_a_plain_result(context, target):
    result = run(context)
    json.dumps(result, allow_nan=False)
    assert {"steps", "tokens", "supervised", "rows_computed", "rows_total"} <= result["counts"].keys()
    assert all(isinstance(n, int) for n in result["counts"].values())
    assert result["best_step"] == 2 and result["tau"] >= 1.0 and result["init"]["copied"]
    draft = load_draft(context.out, target[1])
    assert draft.config.draft_vocab_size == 160 and draft.config.aux_layers == (1, 3, 5)
    provenance = json.loads((context.out / "draft.json").read_text())["provenance"]
    assert provenance["target"] == target[0].name and provenance["step"] == 2


def test_a_missing_vocabulary_is_refused_with_both_sizes(context):
    (context.run_dir / "vocab" / "vocab.safetensors").unlink()
    with pytest.raises(EyasError, match=r"vocab.size 160 of the target's 320 needs it\n.*eyas vocab"):
        run(context)


def test_features_of_another_target_are_refused(context, tmp_path):
    other = make_target(tmp_path / "other", seed=1)
    config = context.config.model_copy(deep=True)
    config.target.model = str(other)
    with pytest.raises(EyasError, match="target_fingerprint"):
        run(Context(config, context.run_dir, context.out))
