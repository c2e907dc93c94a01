"""Environment, the machine itself: room on disk where the run is really written, shared and main memory as a
container allows them, open files, the clock. Packages and GPUs have chapters of their own; all are one stage.
"""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from eyas.pipeline import read_manifest
from eyas.preflight import gpus, packages
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.preflight.model import available_memory

ROOM = 5e9  # bytes on disk that a run wants at least when its size is not known yet
SHARED_MEMORY = 1e9  # a container's default of 64 MB stops data workers
OPEN_FILES = 1024
SKEW = 60.0  # seconds between this machine's clock and its file system's
BUILT = 1.75e9  # 2025-06: no clock that is right shows less


def outputs(s: Subject) -> dict[str, Path]:
    """What will be written where."""
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface", "hub")
    places = {"temporary files": Path(tempfile.gettempdir()), "the hub cache": Path(hub).expanduser()}
    return places | ({"the run": Path(s.config.run_dir)} if s.given_config else {})


def existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there already."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def outputs_are_writable(s: Subject) -> Iterator[Finding]:
    for what, path in outputs(s).items():
        there, level = existing(path), "error" if what != "the hub cache" else "warning"
        evidence = {"path": str(path), "exists": str(there)}
        try:
            with tempfile.TemporaryFile(dir=there) as file:  # no name on disk, nothing left behind
                file.write(b"eyas")
                file.flush()
            yield info(f"{path} can be written ({what})", evidence=evidence)
        except OSError as e:
            reason = e.strerror or str(e)
            key = {"the run": "run_dir", "temporary files": "TMPDIR", "the hub cache": "HF_HOME"}[what]
            yield Finding(
                level, f"{what} goes to {path}, and {there} cannot be written: {reason}", f"set {key}", evidence
            )


def disk_has_room(s: Subject) -> Iterator[Finding]:
    for what, path in outputs(s).items():
        there = existing(path)
        free, need = shutil.disk_usage(there).free, estimate(s) if what == "the run" else None
        evidence = {"path": str(path), "measured_at": str(there), "free_bytes": free, "need_bytes": need}
        text = f"{path} ({what}): {free / 1e9:.1f} GB are free"
        if need is not None:
            text += f", the features to be extracted take about {need / 1e9:.1f} GB"
        wants = need if need is not None else ROOM if what == "the run" else ROOM / 5
        short = free < wants
        level = "info" if not short else "error" if need is not None else "warning"
        yield Finding(level, text, "free some, or set another run_dir" if short else "", evidence)
        inodes = os.statvfs(there)
        if inodes.f_files and not inodes.f_favail:
            yield error(
                f"{path} ({what}): no file can be made, all inodes are in use", "remove files there", evidence
            )


def estimate(s: Subject) -> int | None:
    """Bytes of features still to be extracted; None when data or target are not at hand yet."""
    run = Path(s.config.run_dir)
    prepared, model = read_manifest(run / "prepare"), Path(s.config.target.model).expanduser()
    if read_manifest(run / "extract") or not prepared or not s.config.target.model or not model.is_dir():
        return None
    counts, half = prepared["counts"], s.config.device != "cpu" and s.config.target.dtype != "float32"
    rows = counts.get("tokens", 0) * len(s.aux_layers) + counts.get("supervised", 0)
    return rows * s.spec.hidden_size * (2 if half else 4)


def shared_memory_suffices(s: Subject) -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield info("no /dev/shm here: nothing to measure")
        return
    size = shutil.disk_usage(folder)
    text = f"shared memory: {size.free / 1e9:.2f} of {size.total / 1e9:.2f} GB free"
    evidence = {"total_bytes": size.total, "free_bytes": size.free}
    if size.free < SHARED_MEMORY:
        hint = "start the container with `--shm-size 16g` (or --ipc=host), or use data loaders with num_workers=0"
        yield warning(f"{text}: data workers and NCCL share tensors there", hint, evidence)
    else:
        yield info(text, evidence=evidence)


def main_memory_suffices(s: Subject) -> Iterator[Finding]:
    free, model = available_memory("cpu"), Path(s.config.target.model).expanduser() if s.given_config else None
    weights = sum(f.stat().st_size for f in model.glob("*.safetensors")) if model and s.config.target.model else 0
    evidence = {"free_bytes": free, "target_bytes": weights}
    text = f"{free / 1e9:.1f} GB of main memory are free, a container's limit counted"
    if weights and s.config.device == "cpu" and weights > free:
        text = f"the target's weights take {weights / 1e9:.1f} GB; {text}"
        yield error(text, "use a machine or container with more memory, or a GPU", evidence)
    elif free < 2e9:
        yield warning(text, "importing torch and transformers alone takes 1 GB", evidence)
    else:
        yield info(text, evidence=evidence)


def files_can_be_opened(s: Subject) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text, evidence = f"{soft} files may be open at once (at most {hard})", {"soft": soft, "hard": hard}
    if 0 <= soft < OPEN_FILES:
        yield warning(text, f"`ulimit -n {max(OPEN_FILES, min(hard, 65536))}` before the start", evidence)
    else:
        yield info(text, evidence=evidence)


def clock_is_right(s: Subject) -> Iterator[Finding]:
    """Certificates, resumed runs and file caches all compare times."""
    now, place = time.time(), existing(outputs(s).get("the run", Path(tempfile.gettempdir())))
    if now < BUILT:
        text = f"the clock shows {time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC"
        yield error(text, "set it: downloads fail on certificates that are not valid yet", {"now": now})
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"eyas")
            file.flush()
            skew = os.fstat(file.fileno()).st_mtime - now
    except OSError:
        skew = 0.0  # `writable` tells
    ahead = max((f.stat().st_mtime - now for f in place.glob("*/manifest.json")), default=0.0)
    evidence = {"now": now, "file_system_skew_s": skew, "newest_manifest_s": ahead}
    if abs(skew) > SKEW:
        text = f"the clock differs by {skew:+.0f} s from that of the file system at {place}"
        yield warning(text, "synchronise both (NTP)", evidence)
    elif ahead > SKEW:
        text = f"{place} holds a stage finished {ahead:.0f} s in the future: the clock went back, or is wrong"
        yield warning(text, "synchronise the clock (NTP)", evidence)
    else:
        yield info("the clock agrees with the file system", evidence=evidence)


CHECKS = [
    *packages.CHECKS,
    *gpus.CHECKS,
    Check("writable", "environment", (), outputs_are_writable, "machine"),
    Check("disk", "environment", (), disk_has_room, "machine"),
    Check("shared_memory", "environment", (), shared_memory_suffices, "machine"),
    Check("main_memory", "environment", (), main_memory_suffices, "machine"),
    Check("open_files", "environment", (), files_can_be_opened, "machine"),
    Check("clock", "environment", (), clock_is_right, "machine"),
]
