"""The machine that a run is given: limits really set, folders, clocks, memory."""

import os
import resource
import sys
import time
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.files import write_json
from eyas.preflight import environment, packages
from eyas.preflight.finding import Subject
from eyas.preflight.runner import run_preflight
from tests.preflight.workshop import of


def checks_of(config: RunConfig, *wanted: str) -> list[dict]:
    others = [c.name for c in environment.CHECKS if c.name not in wanted]
    result = run_preflight(Subject(config), ["environment"], others)
    return [f for f in result["stages"][0]["findings"] if f["check"] in wanted and "skipped" not in f["message"]]


@pytest.fixture
def config(tmp_path, healthy) -> RunConfig:
    raw = {"target": {"model": healthy.target.model}, "extract": {"aux_layers": [1, 3, 5]}, "device": "cpu"}
    return RunConfig.parse(raw | {"run_dir": str(tmp_path / "not" / "yet")})


def test_few_open_files_are_a_warning_with_the_command(config):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        (found,) = checks_of(config, "open_files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found["level"] == "warning" and "256 files may be open" in found["message"]
    assert "ulimit -n" in found["hint"]


def test_the_disk_that_is_measured_is_the_one_written(config, tmp_path):
    found = [f for f in checks_of(config, "disk") if "the run" in f["message"]]
    assert found[0]["evidence"]["measured_at"] == str(tmp_path) and found[0]["level"] == "info"


def test_features_larger_than_the_disk_are_an_error(config, tmp_path):
    run = Path(config.run_dir)
    write_json(run / "prepare" / "manifest.json", {"counts": {"tokens": 10**12, "supervised": 10**11}})
    (found,) = [f for f in checks_of(config, "disk") if f["level"] == "error"]
    assert "the features to be extracted take about" in found["message"] and "run_dir" in found["hint"]
    hidden = Subject(config).spec.hidden_size
    assert found["evidence"]["need_bytes"] == (3 * 10**12 + 10**11) * hidden * 4


def test_an_output_that_cannot_be_written_names_the_folder_and_the_key(config):
    (found,) = of(checks_of(config.model_copy(update={"run_dir": "/proc/run"}), "writable"), "error")
    assert "the run goes to /proc/run, and /proc cannot be written" in found["message"]
    assert found["hint"] == "set run_dir"


def test_writing_for_a_test_leaves_nothing_behind(config, tmp_path):
    Path(config.run_dir).mkdir(parents=True)
    before = os.stat(config.run_dir).st_mtime_ns
    assert {f["level"] for f in checks_of(config, "writable", "clock", "disk")} == {"info"}
    assert list(Path(config.run_dir).iterdir()) == [] and os.stat(config.run_dir).st_mtime_ns == before


def test_a_stage_from_the_future_tells_of_a_wrong_clock(config):
    manifest = Path(config.run_dir) / "prepare" / "manifest.json"
    write_json(manifest, {"counts": {}})
    os.utime(manifest, (time.time() + 7200, time.time() + 7200))
    (found,) = checks_of(config, "clock")
    assert found["level"] == "warning" and "in the future" in found["message"] and "NTP" in found["hint"]


def test_a_clock_in_the_past_is_an_error(config, monkeypatch):
    monkeypatch.setattr(environment.time, "time", lambda: 1e9)
    found = checks_of(config, "clock")
    assert "the clock shows 2001-09-09 01:46 UTC" in found[0]["message"] and found[0]["level"] == "error"
    assert "differs by" in found[1]["message"]


def test_little_shared_memory_is_a_warning(config, monkeypatch):
    monkeypatch.setattr(environment, "SHARED_MEMORY", 1e15)
    (found,) = checks_of(config, "shared_memory")
    assert found["level"] == "warning" and "--shm-size" in found["hint"]


def test_a_target_larger_than_the_containers_memory(config, monkeypatch):
    monkeypatch.setattr(environment, "available_memory", lambda device: 1000)
    (found,) = checks_of(config, "main_memory")
    assert found["level"] == "error" and "the target's weights take" in found["message"]


def test_a_gpu_asked_for_where_torch_sees_none(config):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = checks_of(config.model_copy(update={"device": "cuda"}), "python", "torch")
    assert "device: cuda is asked for, and torch sees no GPU" in [f["message"] for f in of(found, "error")]


def test_this_environment_is_healthy(config):
    result = run_preflight(Subject(config), ["environment"])
    assert of(result["stages"][0]["findings"], "error") == []


BUILT = {
    "2.8.3+cu12torch2.8cxx11abiTRUE": {"cuda": "12", "torch": "2.8"},
    "0.1+pt27cu126": {"cuda": "126", "torch": "2.7"},
    "2.13.0+cpu": {"cuda": "cpu"},
    "0.3.1+cu130": {"cuda": "130"},
    "1.0+git123": {},
    "1.0": {},
}


@pytest.mark.parametrize(("version", "built"), BUILT.items())
def test_what_versions_say_they_are_built_for(version, built):
    assert packages.built_for(version) == built


def test_tested_versions_are_those_of_the_constraints():
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    pinned = {n.replace("_", "-"): v for n, _, v in (line.partition("==") for line in lines)}
    assert {n: v for n, v in packages.TESTED.items() if not pinned[n].startswith(v + ".")} == {}


def test_a_newer_major_version_than_any_tested_is_a_warning(config, monkeypatch):
    monkeypatch.setitem(packages.TESTED, "transformers", "4.57")
    (found,) = [f for f in checks_of(config, "python", "versions") if f["level"] == "warning"]
    assert "is newer than the newest that eyas was tested with, 4.57" in found["message"]


def test_an_old_interpreter_for_a_run_is_an_error(config, monkeypatch):
    monkeypatch.setattr(packages, "SUPPORTED", ">=3.99")
    (found,) = [f for f in checks_of(config, "python") if f["level"] == "error"]
    assert sys.version.split()[0] in found["message"] and "eyas needs >=3.99" in found["message"]
