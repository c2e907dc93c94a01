"""Checkpoints: `step-000123/` holds a loadable draft, AdamW's moments, and `state.json` with everything else.

A folder is whole or absent: it is written under a temporary name, fsynced, renamed. `state.json` lists the sizes
of the other files, so one that was cut short later (a full disk, a copy) is recognised too.
"""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas.config import TrainConfig
from eyas.draft import Eagle3DraftModel, save_draft
from eyas.errors import EyasError
from eyas.files import atomic, fsync
from eyas.progress import say, warn
from eyas.train.optim import adamw

COUNTS = ("tokens", "supervised", "rows_computed", "rows_total")
MOMENTS = ("exp_avg", "exp_avg_sq")
PROGRESS = ("step", "counts", "evals", "best")
MAY_CHANGE = {"epochs", "max_steps", "eval_every", "checkpoint_every", "keep_checkpoints"}  # when resuming


@dataclass
class Training:
    """A draft in training. `step`, the optimiser steps done, is also the position in the data and in the learning
    rate schedule: both follow from the seed and the config."""

    model: Eagle3DraftModel  # on its device
    config: TrainConfig
    seed: int
    step: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    evals: list[dict[str, Any]] = field(default_factory=list)  # held-out evaluations, each with its step
    best: int | None = None  # step of the best one

    def __post_init__(self) -> None:
        self.optimizer = adamw(self.model, self.config)

    @property
    def device(self) -> torch.device:
        return self.model.fc.weight.device

    def settings(self) -> dict[str, Any]:
        """All that a checkpoint must agree with: the format, the run's settings, the draft's shape."""
        settings = {"format": "eyas-checkpoint", "version": 3, "seed": self.seed}
        return settings | self.config.model_dump(mode="json") | self.model.config.to_dict()

    def trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def judge(self, row: dict[str, Any]) -> None:
        """Note an evaluation of this step: the best so far if its τ is higher, or equal with a lower loss."""
        if not self.evals or _rank(row) > max(map(_rank, self.evals)):
            self.best = self.step
        self.evals.append({"step": self.step, **row})


def _rank(row: dict[str, Any]) -> tuple[float, float]:
    return row["tau"] or 0.0, -row["loss"]


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def all_steps(root: Path) -> list[int]:
    return sorted(int(f.name.removeprefix("step-")) for f in root.glob("step-*"))


def save(root: Path, training: Training, provenance: dict[str, Any]) -> None:
    """Write the checkpoint of this step, then remove all but `keep_checkpoints` of them and the best."""
    final = folder_of(root, training.step)
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_draft(training.model, temporary, {**provenance, "step": training.step})
    adam = training.optimizer.state
    tensors = {f"{m}.{name}": adam[p][m].contiguous() for name, p in training.trained().items() for m in MOMENTS}
    save_file(tensors, temporary / "optimizer.safetensors")
    files = sorted(temporary.iterdir())
    state = {"settings": training.settings(), "files": {f.name: f.stat().st_size for f in files}}
    state |= {key: getattr(training, key) for key in PROGRESS}
    (temporary / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False) + "\n")
    for path in [*files, temporary / "state.json", temporary]:
        fsync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    fsync(root)
    for step in all_steps(root)[: -training.config.keep_checkpoints]:
        if step != training.best:
            shutil.rmtree(folder_of(root, step))


def resume(root: Path, training: Training) -> None:
    """Bring `training` to the newest whole checkpoint, if there is one.

    Raises EyasError when it was made with other settings, other than how long to train and what to keep.
    """
    if (found := newest(root)) is None:
        return
    folder, state = found
    now, then = training.settings(), state["settings"]
    changed = {k: f"{k} {then.get(k)} -> {now.get(k)}" for k in sorted(now | then) if now.get(k) != then.get(k)}
    if changed.keys() - MAY_CHANGE:
        hint = f"restore them, or delete {root} to train afresh"
        raise EyasError(f"{folder} was made with other settings: {', '.join(changed.values())}", hint)
    training.model.load_state_dict(load_file(folder / "model.safetensors"))
    tensors = load_file(folder / "optimizer.safetensors")
    for name, p in training.trained().items():
        moments = {m: tensors[f"{m}.{name}"].to(p.device) for m in MOMENTS}
        training.optimizer.state[p] = {"step": torch.tensor(float(state["step"]), device=p.device), **moments}
    for key in PROGRESS:
        setattr(training, key, state[key])
    if training.best is not None and not folder_of(root, training.best).is_dir():
        warn(f"the best checkpoint so far, step {training.best}, is gone: the best of what follows is kept")
        training.best, training.evals = None, []
    best = f"; best so far: step {training.best}" if training.best else ""
    say(f"going on after step {training.step}{best}" + "".join(f"; {c}" for c in changed.values()))


def newest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its state. Younger broken ones are named, with the reason, and removed."""
    for temporary in root.glob(".step-*.tmp"):  # a kill while writing: this never was a checkpoint
        shutil.rmtree(temporary)
    for step in reversed(all_steps(root)):
        folder = folder_of(root, step)
        if isinstance(found := _state(folder), dict):
            return folder, found
        shutil.rmtree(folder)
        older = all_steps(root)
        instead = f"trying {folder_of(root, older[-1]).name}" if older else "no older one: starting afresh"
        warn(f"checkpoint {folder} is not whole: {found}; {instead}")
    return None


def _state(folder: Path) -> dict[str, Any] | str:
    """A checkpoint's `state.json`, or the reason why it cannot be used."""
    try:
        state = json.loads((folder / "state.json").read_text())
        for name, expected in state["files"].items():
            if (size := (folder / name).stat().st_size) != expected:
                return f"{name} has {size} bytes, expected {expected}"
    except FileNotFoundError as e:
        return f"{Path(e.filename).name} is missing"
    except (ValueError, KeyError) as e:
        return f"state.json cannot be read ({e!r})"
    return state


def publish(root: Path, step: int, out: Path) -> None:
    """Copy the draft of checkpoint `step` to `out`."""
    for name in ("model.safetensors", "draft.json"):
        with atomic(out / name) as temporary:
            shutil.copyfile(folder_of(root, step) / name, temporary)


def check_disk(root: Path, training: Training) -> None:
    """Raise EyasError when the checkpoints (those kept, the best, one being written) and the result do not fit."""
    root.mkdir(parents=True, exist_ok=True)
    weights = sum(t.nbytes for t in training.model.state_dict().values())
    each = weights + sum(p.numel() * 4 * len(MOMENTS) for p in training.trained().values())
    there = sum(f.stat().st_size for f in root.rglob("*") if f.is_file())
    number, free = training.config.keep_checkpoints + 2, shutil.disk_usage(root).free
    if (needed := number * each + weights - there) > free:
        listed = f"{number} checkpoints (one being written) of {each / 1e9:.2f} GB and the result"
        found = f"{root}: {listed} need {needed / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free"
        raise EyasError(found, "free some space, or lower train.keep_checkpoints")
