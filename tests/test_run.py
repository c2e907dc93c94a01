"""The whole chain on a tiny real target: every stage, freshness, kills, commands, JSON, exit codes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from eyas import pipeline
from eyas.config import RunConfig
from eyas.errors import EyasError
from tests.tiny import make_conversations, make_target

STAGES = ["regenerate", "prepare", "extract", "vocab", "train", "evaluate", "export", "report"]


def config(folder: Path, run_dir: str, **sections) -> Path:
    """A run of seconds over the tiny target in `folder`."""
    raw = {
        "run_dir": str(folder / run_dir),
        "target": {"model": str(folder / "target")},
        "data": {"sources": [str(folder / "data.jsonl")], "heldout": 0.25},
        "regenerate": {"mode": "all", "max_new_tokens": 16, "batch_size": 4},
        "extract": {"aux_layers": [1, 3, 5], "batch_tokens": 256, "shard_mb": 1},
        "vocab": {"size": 200},
        "train": {"ttt_steps": 3, "epochs": 3, "batch_tokens": 256, "lr": 1e-3, "dtype": "float32"},
        "evaluate": {"heldout_prompts": 3, "max_new_tokens": 12},
        "device": "cpu",
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values if isinstance(values, dict) else values
    path = folder / f"{run_dir}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def eyas(*args, **kwargs) -> subprocess.CompletedProcess:
    """The command as a user runs it."""
    command = [sys.executable, "-m", "eyas.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def contents(run_dir: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of every file that must not depend on how often the run was killed."""
    manifests = {s: pipeline.read_manifest(run_dir / s) for s in STAGES if s != "report"}
    return {s: {name: f["sha256"] for name, f in m["files"].items()} for s, m in manifests.items() if m}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_target(folder / "target")
    make_conversations(folder / "data.jsonl", 24)
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    """A run made without interruption, and what `eyas run --json` printed."""
    done = eyas("run", config(folder, "whole"), "--json")
    assert done.returncode == 0, done.stderr
    return folder / "whole", json.loads(done.stdout)


@pytest.mark.slow
def test_a_run_makes_every_stage_and_prints_one_json_object(finished):
    run_dir, printed = finished
    assert list(printed["stages"]) == STAGES
    assert {s["status"] for s in printed["stages"].values()} == {"done"}
    for stage in STAGES:
        manifest = json.loads((run_dir / stage / "manifest.json").read_text())
        assert manifest["status"] == "complete"
        assert (run_dir / stage / "result.json").is_file()
    assert (run_dir / "preflight" / "result.json").is_file()
    assert (run_dir / "report" / "index.html").stat().st_size > 10_000
    assert printed["stages"]["evaluate"]["different"] == 0


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_do(finished):
    run_dir, _ = finished
    again = eyas("run", run_dir / "run.yaml", "--json")
    assert {s["status"] for s in json.loads(again.stdout)["stages"].values()} == {"fresh"}


@pytest.mark.slow
def test_status_names_what_changed_and_only_that_runs_again(finished, folder):
    run_dir, _ = finished
    changed = RunConfig.load(run_dir / "run.yaml")
    changed.evaluate.draft_tokens = 2
    stale = [s.name for s in pipeline.stages_of(changed) if pipeline.why_stale(s, changed, run_dir)]
    assert stale == ["evaluate", "export"]
    assert "evaluate" in (pipeline.why_stale(pipeline.BY_NAME["evaluate"], changed, run_dir) or "")
    shown = eyas("status", run_dir, "--json")
    assert {s["state"] for s in json.loads(shown.stdout)["stages"].values()} == {"fresh"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_anywhere_the_same_command_ends_with_the_same_bytes(finished, folder, seed):
    whole, _ = finished
    path = config(folder, f"killed{seed}")
    rng = random.Random(seed)
    kills = 0
    while kills < 6:
        process = subprocess.Popen(
            [sys.executable, "-m", "eyas.cli", "run", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(2.0, 9.0))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills > 0
    last = eyas("run", path)
    assert last.returncode == 0, last.stderr
    assert contents(folder / f"killed{seed}") == contents(whole)


@pytest.mark.slow
def test_a_truncated_file_is_noticed_and_its_stage_runs_again(finished, folder):
    run_dir, _ = finished
    file = run_dir / "vocab" / "vocab.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-8])
    reason = pipeline.why_stale(pipeline.BY_NAME["vocab"], RunConfig.load(run_dir / "run.yaml"), run_dir)
    assert reason == f"{file} has {len(before) - 8} bytes, expected {len(before)}"
    assert eyas("run", run_dir / "run.yaml", "--quiet").returncode == 0
    assert file.read_bytes() == before


def test_one_stage_alone_refuses_to_start_on_missing_inputs(folder):
    refused = eyas("extract", config(folder, "missing"), "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["ok"] is False
    assert "prepare" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_two_processes_cannot_work_in_one_run(folder):
    settings = RunConfig.load(config(folder, "locked"))
    Path(settings.run_dir).mkdir()
    with pipeline._lock(Path(settings.run_dir)), pytest.raises(EyasError, match="another eyas process"):
        pipeline.run(settings, only="prepare")


def test_a_missing_data_file_is_wrong_usage_and_names_the_file(folder):
    refused = eyas("run", config(folder, "nodata", data={"sources": [str(folder / "nowhere.jsonl")]}))
    assert refused.returncode == 2
    assert "nowhere.jsonl" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [(["--help"], 0), (["--version"], 0), (["run", "-h"], 0), (["preflight", "-h"], 0), (["fly"], 2), ([], 2)],
)
def test_help_and_wrong_usage_exit_as_promised(args, code):
    assert eyas(*args).returncode == code


def test_light_commands_import_nothing_heavy():
    script = (
        "import sys; from eyas.cli import run; run(['config', 'explain', '--json']); print(sorted(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    modules = out.splitlines()[-1]
    for heavy in ("'torch'", "'transformers'", "'datasets'", "'plotly'"):
        assert heavy not in modules


def test_every_module_imports_in_a_fresh_interpreter():
    root = Path(pipeline.__file__).parent
    names = [".".join(p.relative_to(root.parent).with_suffix("").parts) for p in sorted(root.rglob("*.py"))]
    names = [n.removesuffix(".__init__") for n in names]
    # one process a module would take minutes: fork for each import, from a process that knows nothing of eyas
    script = (
        "import os, sys, importlib, torch, torch.utils.tensorboard, transformers, tyro, plotly\n"
        "for name in sys.argv[1:]:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except BaseException as e:\n"
        "            print(name, repr(e), flush=True)\n"
        "            os._exit(1)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=True)
    assert done.stdout == ""
