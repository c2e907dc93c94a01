"""Checkpoints: `step-000123/` holds a loadable draft, the optimiser's moments and `state.json`, written last.

A folder is whole or absent: it is written under a temporary name, fsynced, renamed. `state.json` lists the size of
every other file, so one that was cut short later (a full disk, a copy) is recognised too.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eyas.config import TrainConfig
from eyas.draft import Eagle3DraftModel, save_draft
from eyas.errors import EyasError
from eyas.files import atomic, fsync
from eyas.progress import say, warn

FORMAT = {"format": "eyas-checkpoint", "version": 1, "world_size": 1}
MOMENTS = ("exp_avg", "exp_avg_sq")
MAY_CHANGE = {"epochs", "max_steps", "eval_every", "checkpoint_every", "keep_checkpoints"}  # between two processes


@dataclass
class Progress:
    """What a later process must know besides tensors. The number of steps done is the data position and the place in
    the learning rate schedule: the order of all micro-batches follows from the seed."""

    step: int = 0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("tokens", "supervised", "rows_computed", "rows_total"), 0)
    )
    evals: list[dict[str, Any]] = field(default_factory=list)
    best: int | None = None  # step of the best evaluation

    def judge(self, row: dict[str, Any]) -> None:
        """Note an evaluation of this step; it is the best if its τ is higher, or equal with a lower loss."""
        rank = lambda e: (e["tau"] or 0.0, -e["loss"])  # noqa: E731
        best = next((e for e in self.evals if e["step"] == self.best), None)
        if best is None or rank(row) > rank(best):
            self.best = self.step
        self.evals.append({"step": self.step, **row})


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def all_steps(root: Path) -> list[int]:
    return sorted(int(f.name.removeprefix("step-")) for f in root.glob("step-*"))


def save(
    root: Path,
    model: Eagle3DraftModel,
    optimizer: torch.optim.Optimizer,
    noise: torch.Generator,
    progress: Progress,
    state: dict[str, Any],
    provenance: dict[str, Any] | None = None,
) -> None:
    """Write the checkpoint of `progress.step`. `state`: further JSON-able facts that a later process checks."""
    final = folder_of(root, progress.step)
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_draft(model, temporary, {**(provenance or {}), "step": progress.step})
    moments = {
        f"{kind}.{name}": optimizer.state[p][kind].contiguous()
        for name, p in model.named_parameters()
        if p in optimizer.state
        for kind in MOMENTS
    }
    save_file({**moments, "noise_rng": noise.get_state()}, temporary / "optimizer.safetensors")
    files = sorted(temporary.iterdir())
    state = {**FORMAT, **asdict(progress), **state, "files": {f.name: f.stat().st_size for f in files}}
    (temporary / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False) + "\n")
    for path in [*files, temporary / "state.json", temporary]:
        fsync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    fsync(root)


def resume(
    root: Path,
    model: Eagle3DraftModel,
    optimizer: torch.optim.Optimizer,
    noise: torch.Generator,
    config: TrainConfig,
    seed: int,
) -> Progress:
    """Load the newest whole checkpoint, if there is one, into model, optimiser and generator.

    Raises EyasError when it was made with another config (beyond how long to train and what to keep) or seed, or when
    a tensor is missing or of another shape.
    """
    found = newest(root)
    if found is None:
        return Progress()
    folder, state = found
    now = {"seed": seed, **config.model_dump(mode="json")}
    then = {"seed": state["seed"], **state["config"]}
    if changed := [
        f"{k} {then.get(k)} -> {now.get(k)}" for k in now.keys() | then.keys() if now.get(k) != then.get(k)
    ]:
        if any(c.split()[0] not in MAY_CHANGE for c in changed):
            raise EyasError(
                f"{folder} was made with other settings: {', '.join(sorted(changed))}",
                f"restore them, or delete {root} to train afresh",
            )
        say(f"resuming with {', '.join(sorted(changed))}")
    model.load_state_dict(load_file(folder / "model.safetensors"))
    tensors = load_file(folder / "optimizer.safetensors")
    for name, p in model.named_parameters():
        if p.requires_grad:
            moments = {kind: _moment(tensors, f"{kind}.{name}", p, folder) for kind in MOMENTS}
            optimizer.state[p] = {"step": torch.tensor(float(state["step"]), device=p.device), **moments}
    if tensors["noise_rng"].shape == noise.get_state().shape:
        noise.set_state(tensors["noise_rng"])
    else:
        warn(f"{folder} was written on another kind of device: its random state is ignored")
    progress = Progress(**{k: state[k] for k in ("step", "counts", "evals", "best")})
    if progress.best is not None and not folder_of(root, progress.best).is_dir():
        warn(
            f"the best checkpoint so far, step {progress.best}, is gone: the best is chosen from step {progress.step} on"
        )
        progress.best = None
    say(
        f"going on after step {progress.step}" + (f" (best so far: step {progress.best})" if progress.best else "")
    )
    return progress


def _moment(tensors: dict[str, torch.Tensor], name: str, p: nn.Parameter, folder: Path) -> torch.Tensor:
    if name not in tensors or tensors[name].shape != p.shape:
        found = tuple(tensors[name].shape) if name in tensors else "nothing"
        raise EyasError(f"{folder}/optimizer.safetensors: {name}: expected shape {tuple(p.shape)}, found {found}")
    return tensors[name].to(p.device)


def newest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its state. Younger broken ones are named, with the reason, and removed."""
    for temporary in root.glob(".step-*.tmp"):  # a kill while writing: this never was a checkpoint
        shutil.rmtree(temporary)
    broken: list[str] = []
    for step in reversed(all_steps(root)):
        folder = folder_of(root, step)
        fault = _fault(folder)
        if fault is None:
            for text in broken:
                warn(f"{text}; going on from {folder.name} instead")
            return folder, json.loads((folder / "state.json").read_text())
        broken.append(f"checkpoint {folder} is not whole: {fault}")
        shutil.rmtree(folder)
    for text in broken:
        warn(f"{text}; there is no older one, starting from the first step")
    return None


def _fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    try:
        listed: dict[str, int] = json.loads((folder / "state.json").read_text())["files"]
    except FileNotFoundError:
        return "state.json is missing"
    except (ValueError, KeyError) as e:
        return f"state.json cannot be read ({e!r})"
    for name, expected in listed.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != expected:
            return f"{name} has {size} bytes, expected {expected}"
    return None


def prune(root: Path, keep: int, best: int | None) -> None:
    """Keep the `keep` newest checkpoints and that of step `best`."""
    for step in all_steps(root)[:-keep]:
        if step != best:
            shutil.rmtree(folder_of(root, step))


def publish(root: Path, step: int, out: Path) -> None:
    """Copy the draft of checkpoint `step` to `out`."""
    for name in ("model.safetensors", "draft.json"):
        with atomic(out / name) as temporary:
            shutil.copyfile(folder_of(root, step) / name, temporary)


def check_disk(root: Path, model: Eagle3DraftModel, keep: int) -> None:
    """Raise EyasError when the checkpoints (`keep`, the best, one being written) and the result will not fit."""
    root.mkdir(parents=True, exist_ok=True)
    weights = sum(t.nbytes for t in model.state_dict().values())
    moments = sum(p.numel() * 4 * len(MOMENTS) for p in model.parameters() if p.requires_grad)
    held = sum(f.stat().st_size for f in root.rglob("*") if f.is_file())
    needed, free = (keep + 2) * (weights + moments) + weights - held, shutil.disk_usage(root).free
    if needed > free:
        raise EyasError(
            f"{root}: checkpoints need {needed / 1e9:.2f} GB ({keep} + best + the one being written, "
            f"{(weights + moments) / 1e9:.2f} GB each), {free / 1e9:.2f} GB are free",
            "free some space, or lower train.keep_checkpoints",
        )
