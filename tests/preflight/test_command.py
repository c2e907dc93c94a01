"""The command, and the checks that `eyas run` makes before each dear stage."""

import json
from pathlib import Path

import pytest

from eyas.cli import _before, run
from eyas.config import RunConfig
from eyas.errors import EyasError, UsageError
from eyas.export.export import write_layout
from eyas.preflight.finding import Subject
from eyas.report.build import read_run
from tests.preflight.faults import each, samples, setting
from tests.preflight.foreign import write
from tests.preflight.healthy import copy_of


@pytest.fixture
def config(healthy, tmp_path) -> RunConfig:
    return copy_of(healthy, tmp_path / "spoilt")


def preflight(config: RunConfig, tmp_path: Path, capsys, *flags: str) -> tuple[int, dict]:
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    code = run(["preflight", str(path), "--json", "--quiet", *flags])
    return code, json.loads(capsys.readouterr().out)


def test_the_result_is_kept_and_on_the_runs_page(config, tmp_path, capsys):
    code, result = preflight(config, tmp_path, capsys)
    assert code == 0 and result["ok"]
    assert json.loads((Path(config.run_dir) / "preflight" / "result.json").read_text()) == result
    shown = {f["where"] for f in read_run(Path(config.run_dir))["findings"]}
    assert shown == {f"preflight: {s['name']}" for s in result["stages"]}


def test_named_features_and_a_named_draft_are_looked_at(config, tmp_path, capsys):
    subject = Subject(config)
    write_layout(tmp_path / "draft", "vllm", subject.trial, subject.spec, "bfloat16", 3)
    files = write(tmp_path / "files", config, "vllm")
    flags = ("--features", str(files), "--draft", str(tmp_path / "draft"), "--target", config.target.model)
    code, result = preflight(config, tmp_path, capsys, *flags, "--stage", "features", "deploy")
    told = " ".join(f["message"] for s in result["stages"] for f in s["findings"])
    assert code == 0 and "6 files of vLLM hidden states" in told and "is of the vllm layout" in told


def test_warnings_fail_when_asked_to(config, tmp_path, capsys):
    odd = setting(train={"warmup": 1.0})(config)
    assert preflight(odd, tmp_path, capsys, "--stage", "config")[0] == 0
    assert preflight(odd, tmp_path, capsys, "--stage", "config", "--strict")[0] == 1


def test_a_spent_budget_skips_and_says_so(config, tmp_path, capsys):
    code, result = preflight(config, tmp_path, capsys, "--budget", "0")
    assert code == 0 and {s["status"] for s in result["stages"]} == {"skipped"}
    assert "the time budget of 0 s is spent" in result["stages"][-1]["findings"][-1]["message"]


def test_a_run_with_an_impossible_config_stops_before_its_first_stage(config, tmp_path, capsys):
    spoilt = setting(train={"lr": 10.0}, run_dir=str(tmp_path / "new"))(config)
    path = tmp_path / "run.yaml"
    path.write_text(spoilt.to_yaml())
    assert run(["run", str(path), "--quiet"]) == 2
    assert "train.lr 10 would destroy the draft" in capsys.readouterr().err
    assert {p.name for p in (tmp_path / "new").iterdir() if p.is_dir()} == {"preflight"}


def test_before_hours_of_extraction_the_samples_are_looked_at(config):
    _before(config)["extract"]()
    samples(each(lambda r: r.update(loss_mask=[False] * len(r["loss_mask"]))))(config)
    with pytest.raises(EyasError, match=r"preflight failed: .*expected a supervised token") as raised:
        _before(config)["extract"]()
    assert not isinstance(raised.value, UsageError) and "--no-preflight" in raised.value.hint
