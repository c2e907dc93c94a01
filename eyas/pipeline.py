"""Stages, their manifests, and what is fresh.

A stage is a function `run(ctx) -> result` that writes files into `ctx.out`. That folder is `<stage>.partial`
until the manifest, written last, is in it; then it takes the stage's name. A stage that is killed finds what it
had already written in `ctx.out` when it runs again with the same fingerprint, and goes on. Files under `logs/` and
`result.json` hold timings and are not part of a stage's digest; all else must come out the same, byte for byte.
"""

import fcntl
import glob
import importlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyas import __version__
from eyas.config import RunConfig
from eyas.errors import EyasError, UsageError
from eyas.files import fsync, sha256_file, sha256_json, write_json, write_text
from eyas.progress import say

SCHEMA = 1
SMALL = 1 << 26  # bytes; larger files of a finished stage are told by their size alone


@dataclass(frozen=True)
class Stage:
    """`module.run` is imported only when the stage runs. `keys` are the config keys that decide its bytes."""

    name: str
    module: str
    keys: tuple[str, ...]
    needs: tuple[str, ...] = ()
    reads_sources: bool = False
    reads_target: bool = False


STAGES = [
    Stage(
        "regenerate",
        "eyas.data.regenerate",
        ("regenerate", "data.limit", "seed", "target.dtype", "target.attention"),
        reads_sources=True,
        reads_target=True,
    ),
    Stage("prepare", "eyas.data.prepare", ("data",), ("regenerate",), reads_sources=True, reads_target=True),
    Stage(
        "extract",
        "eyas.features.extract",
        ("extract", "target.dtype", "target.attention"),
        ("prepare",),
        reads_target=True,
    ),
    Stage("vocab", "eyas.vocab", ("vocab",), ("prepare",), reads_target=True),
    Stage("train", "eyas.train.stage", ("draft", "train", "seed"), ("extract", "vocab"), reads_target=True),
    Stage(
        "evaluate",
        "eyas.decode.evaluate",
        ("evaluate", "target.dtype", "target.attention"),
        ("prepare", "train"),
        reads_target=True,
    ),
    Stage(
        "export",
        "eyas.export.export",
        ("export", "evaluate.draft_tokens"),
        ("extract", "train"),
        reads_target=True,
    ),
    Stage("report", "eyas.report.build", (), ("prepare", "extract", "vocab", "train", "evaluate", "export")),
]
BY_NAME = {s.name: s for s in STAGES}


@dataclass(frozen=True)
class Context:
    """What a stage may know: the config, its own folder, and the finished folders of the stages before it."""

    config: RunConfig
    run_dir: Path
    out: Path

    def input(self, stage: str) -> Path:
        """Folder of a finished stage. Raises EyasError if it has not been made."""
        folder = self.run_dir / stage
        if not (folder / "manifest.json").is_file():
            raise EyasError(f"stage {stage} of {self.run_dir} is not there", "make it with `eyas run CONFIG`")
        return folder


def stages_of(config: RunConfig) -> list[Stage]:
    """The stages this config asks for, in order."""
    return [s for s in STAGES if s.name != "regenerate" or config.regenerate.mode != "none"]


def source_files(sources: list[str]) -> dict[str, Path | None]:
    """Each local file the sources name; a hub dataset id maps to None. Raises UsageError for a missing file."""
    found: dict[str, Path | None] = {}
    for source in sources:
        matches = sorted(glob.glob(os.path.expanduser(source), recursive=True))
        looks_local = Path(source).suffix in {".json", ".jsonl", ".parquet"} or source.startswith((".", "/", "~"))
        if matches:
            found |= {m: Path(m) for m in matches if Path(m).is_file()}
        elif looks_local or source.count("/") != 1:
            raise UsageError(
                f"data source {source!r} matches no file", "give a file, a glob, or a hub id `org/name`"
            )
        else:
            found[source] = None
    return found


def _inputs(stage: Stage, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Fingerprints of everything outside the config that decides the stage's bytes."""
    inputs: dict[str, Any] = {}
    for need in stage.needs:
        manifest = read_manifest(run_dir / need) if BY_NAME[need] in stages_of(config) else None
        if manifest:
            inputs[need] = manifest.get("digest")
    if stage.reads_sources and not ("regenerate" in stage.needs and config.regenerate.mode != "none"):
        files = source_files(config.data.sources)
        inputs["sources"] = {k: sha256_file(p) if p else "hub" for k, p in files.items()}
    if stage.name == "evaluate":
        inputs["prompts"] = {
            k: sha256_file(p) if p else "hub" for k, p in source_files(config.evaluate.prompts).items()
        }
    if stage.reads_target:
        from eyas.target.spec import TargetSpec

        inputs["target"] = TargetSpec.load(config.target.model, config.target.revision).fingerprint
    return inputs


def _slice(stage: Stage, config: RunConfig) -> dict[str, Any]:
    whole = config.model_dump(mode="json")
    picked = {}
    for key in stage.keys:
        value: Any = whole
        for part in key.split("."):
            value = value[part]
        picked[key] = value
    return picked


def fingerprint(stage: Stage, config: RunConfig, run_dir: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(hash, inputs, config slice) of a stage as it would run now."""
    inputs, chosen = _inputs(stage, config, run_dir), _slice(stage, config)
    return (
        sha256_json({"schema": SCHEMA, "stage": stage.name, "inputs": inputs, "config": chosen}),
        inputs,
        chosen,
    )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """A finished stage's manifest, or None when the stage is absent or unfinished."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
        if not isinstance(manifest, dict):
            raise ValueError(f"it holds {type(manifest).__name__}")
        return manifest
    except ValueError as e:
        raise EyasError(f"{path} is not a stage's manifest: {e}", f"delete {folder} and run again") from e


def why_stale(stage: Stage, config: RunConfig, run_dir: Path) -> str | None:
    """None when the stage is fresh, else the reason it must run."""
    manifest = read_manifest(run_dir / stage.name)
    if manifest is None:
        return "not made yet"
    now, inputs, chosen = fingerprint(stage, config, run_dir)
    if manifest.get("fingerprint") != now:
        then = {"inputs": {}, "config": {}} | manifest
        changed = [k for k in inputs if then["inputs"].get(k) != inputs[k]]
        changed += [k for k in chosen if then["config"].get(k) != chosen[k]]
        return f"changed: {', '.join(changed) or 'schema'}"
    for name, entry in manifest["files"].items():
        path = run_dir / stage.name / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            return f"{path} has {size} bytes, expected {entry['bytes']}"
        if entry["bytes"] <= SMALL and sha256_file(path) != entry["sha256"]:
            return f"{path} is not what the stage wrote: its SHA-256 differs"
    return None


def run(
    config: RunConfig,
    *,
    start: str | None = None,
    only: str | None = None,
    before: dict[str, Callable[[], None]] | None = None,
) -> dict[str, Any]:
    """Run every stage that is not fresh (or `only` one; or everything from `start` on, fresh or not).

    `before[stage]` is called just before that stage runs (the preflight before train). Returns the JSON object
    of `eyas run`. Raises EyasError from the stage that failed; what earlier stages made is kept.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise EyasError(f"run_dir {run_dir} cannot be made: {e.strerror}", "name another folder") from e
    if (run_dir / "run.yaml").is_file() and not (run_dir / "run.json").is_file():
        found = f"{run_dir / 'run.yaml'} was not written by eyas and would be replaced"
        raise UsageError(found, "let run_dir be a folder of its own")
    with _lock(run_dir):
        write_json(run_dir / "run.json", provenance(config))  # first: it marks run.yaml as ours
        write_text(run_dir / "run.yaml", config.to_yaml())
        results: dict[str, Any] = {}
        wanted = stages_of(config)
        forced = {s.name for s in wanted[[s.name for s in wanted].index(start) :]} if start else {only}
        for stage in wanted:
            if only and stage.name != only:
                continue
            for need in stage.needs if only else ():
                if BY_NAME[need] in wanted and (reason := why_stale(BY_NAME[need], config, run_dir)):
                    raise EyasError(
                        f"stage {only} needs {need}, which is not fresh ({reason})",
                        "run `eyas run CONFIG` instead",
                    )
            _recover(run_dir, stage.name)
            reason = "asked for" if stage.name in forced else why_stale(stage, config, run_dir)
            if reason is None:
                say(f"{stage.name}: fresh", "dim")
                results[stage.name] = {"status": "fresh", **_result(run_dir / stage.name)}
                continue
            if before and stage.name in before:
                before[stage.name]()
            say(f"{stage.name} ({reason})", "bold")
            results[stage.name] = {"status": "done", **_run_stage(stage, config, run_dir)}
    return {"run_dir": str(run_dir), "stages": results}


def _run_stage(stage: Stage, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    mark, inputs, chosen = fingerprint(stage, config, run_dir)
    out = run_dir / f"{stage.name}.partial"
    marker = out / ".fingerprint"
    if out.exists() and (not marker.is_file() or marker.read_text() != mark):
        shutil.rmtree(out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    write_text(marker, mark)
    started, clock = time.time(), time.perf_counter()
    result = importlib.import_module(stage.module).run(Context(config, run_dir, out))
    result["seconds"] = round(time.perf_counter() - clock, 2)
    write_json(out / "result.json", result)
    marker.unlink()
    files = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        name = path.relative_to(out).as_posix()
        if name not in {"result.json", "manifest.json"} and not name.startswith("logs/"):
            files[name] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    manifest = {
        "schema": SCHEMA,
        "stage": stage.name,
        "status": "complete",
        "eyas": __version__,
        "fingerprint": mark,
        "inputs": inputs,
        "config": chosen,
        "counts": result.get("counts", {}),
        "digest": sha256_json({k: v["sha256"] for k, v in files.items()}),
        "files": files,
        "started": started,
        "finished": time.time(),
    }
    write_json(out / "manifest.json", manifest)
    _recover(run_dir, stage.name)
    return _result(run_dir / stage.name)


def _recover(run_dir: Path, stage: str) -> None:
    """Finish the swap of a complete `.partial` into place; safe to be killed anywhere and called again."""
    partial, final, old = run_dir / f"{stage}.partial", run_dir / stage, run_dir / f"{stage}.old"
    if (partial / "manifest.json").is_file():
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(final, old)
        os.replace(partial, final)
        fsync(run_dir)
    shutil.rmtree(old, ignore_errors=True)


def _result(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "result.json").read_text())
    except (OSError, ValueError) as e:
        raise EyasError(f"{folder / 'result.json'} cannot be read: {e}", f"delete {folder} and run again") from e


@contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    with open(run_dir / ".lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError(
                f"another eyas process is working in {run_dir}", "wait for it, or use another run_dir"
            ) from None
        yield


def status(run_dir: Path) -> dict[str, Any]:
    """The JSON object of `eyas status`: each stage's state as the run's own config sees it."""
    if not (run_dir / "run.yaml").is_file():
        raise UsageError(f"{run_dir} is not a run: it has no run.yaml", "pass the folder that `eyas run` made")
    config = RunConfig.load(run_dir / "run.yaml").model_copy(update={"run_dir": str(run_dir)})
    stages: dict[str, Any] = {}
    for stage in stages_of(config):
        reason = why_stale(stage, config, run_dir)
        state = (
            "fresh" if reason is None else "partial" if (run_dir / f"{stage.name}.partial").exists() else "stale"
        )
        manifest = read_manifest(run_dir / stage.name)
        if manifest is None and state == "stale":
            state = "missing"
        stages[stage.name] = {
            "state": state,
            "reason": reason,
            "counts": manifest["counts"] if manifest else {},
        }
        if manifest:
            stages[stage.name]["seconds"] = _result(run_dir / stage.name).get("seconds")
    return {"run_dir": str(run_dir), "stages": stages}


def provenance(config: RunConfig) -> dict[str, Any]:
    """Versions, git commit, seed, hardware: what another person needs to repeat the run."""
    import torch

    versions = {"python": platform.python_version(), "eyas": __version__}
    for package in ("torch", "transformers", "safetensors", "datasets", "vllm", "sglang"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions,
        "git": git.stdout.strip() or None,
        "seed": config.seed,
        "hardware": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": gpus,
        },
    }
