"""The export stage: both folders, proved; or nothing written."""

import json

import pytest
import torch
from safetensors.torch import load_file

from eyas.config import RunConfig
from eyas.errors import EyasError
from eyas.export import export, vllm
from eyas.export.verify import verify
from eyas.pipeline import Context
from tests.export.conftest import make_run, trained


def context(folder, spec, **settings) -> Context:
    config = {"run_dir": str(folder), "target": {"model": str(spec.path)}, "export": settings}
    config = RunConfig.parse(config | {"evaluate": {"draft_tokens": 4}})
    (folder / "run.yaml").write_text(config.to_yaml())
    (folder / "out").mkdir()
    return Context(config, folder, folder / "out")


def test_both_layouts_are_written_and_proved(tmp_path, spec, draft, features):
    ctx = context(make_run(tmp_path, spec, draft, features), spec)
    result = export.run(ctx)
    assert list(result["verify"]) == ["vllm", "sglang"] and result["warnings"] == []
    assert all(v["ok"] and v["proof"]["rows"] == 9 for v in result["verify"].values())
    assert result["counts"]["tensors"] == 15
    for layout in ("vllm", "sglang"):
        folder = ctx.out / layout
        assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
        state = load_file(folder / "model.safetensors")
        assert state["d2t"].dtype == torch.int64 and list(state["d2t"].shape) == [100]
        assert state["t2d"].dtype == torch.bool and state["t2d"].sum() == 100 and len(state["t2d"]) == 320
        assert state["lm_head.weight"].dtype == torch.bfloat16 and "embed_tokens.weight" not in state
        again = verify(folder, run_dir=tmp_path)
        assert again["ok"] and again["proof"]["rows"] == 9
    proposals = json.loads((ctx.out / "vllm" / "config.json").read_text())["speculators_config"][
        "proposal_methods"
    ]
    assert proposals[0]["speculative_tokens"] == 4
    before = {p: p.read_bytes() for p in ctx.out.rglob("*.*")}
    export.run(ctx)
    assert before == {p: p.read_bytes() for p in ctx.out.rglob("*.*")}


def test_a_full_vocabulary_has_no_tables(tmp_path, spec, features):
    ctx = context(make_run(tmp_path, spec, trained(spec, 320), features), spec, layouts=["vllm"], dtype="float32")
    export.run(ctx)
    state = load_file(ctx.out / "vllm" / "model.safetensors")
    assert "d2t" not in state and "t2d" not in state and state["fc.weight"].dtype == torch.float32


def test_a_draft_an_engine_would_misread_is_refused_before_anything_is_written(tmp_path, spec, features):
    ctx = context(make_run(tmp_path, spec, trained(spec, norm_before_residual=True), features), spec)
    with pytest.raises(EyasError, match="norm_before_residual"):
        export.run(ctx)
    assert list(ctx.out.iterdir()) == []


def test_an_export_that_does_not_prove_itself_fails(tmp_path, spec, draft, features, monkeypatch):
    ctx = context(make_run(tmp_path, spec, draft, features), spec)
    written = vllm.config
    monkeypatch.setattr(vllm, "config", lambda *a: written(*a) | {"norm_output": True})
    with pytest.raises(EyasError, match="the vllm export does not prove itself: logits differ"):
        export.run(ctx)


def test_values_the_stored_type_cannot_hold_fail_the_export(tmp_path, spec, features):
    draft = trained(spec)
    with torch.no_grad():
        draft.fc.weight[0, 0] = 1e6
    ctx = context(make_run(tmp_path, spec, draft, features), spec, dtype="float16")
    with pytest.raises(EyasError, match=r"fc\.weight has 1 values that are NaN or infinite"):
        export.run(ctx)
