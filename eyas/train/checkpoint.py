"""Checkpoints: `step-000123/` holds a loadable draft, the optimiser's moments and `state.json`, written last.

A folder is whole or absent: it is written under a temporary name, fsynced, renamed. `state.json` lists the size of
every other file, so one that was cut short later (a full disk, a copy) is recognised too.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eyas.errors import EyasError
from eyas.files import fsync
from eyas.progress import warn

FORMAT = {"format": "eyas-checkpoint", "version": 1}


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def save(root: Path, step: int, write_draft: Callable[[Path], Any], moments: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write checkpoint `step` under `root`, replacing one of the same step.

    Args:
        write_draft: writes the draft into the folder it is given.
        moments: tensors of the optimiser and of the noise generator.
        state: JSON-able; everything else a later process must know.
    """
    final = step_folder(root, step)
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_draft(temporary)
    save_file({k: v.contiguous() for k, v in moments.items()}, temporary / "optimizer.safetensors")
    files = sorted(temporary.iterdir())
    state = {**FORMAT, "step": step, **state, "files": {f.name: f.stat().st_size for f in files}}
    (temporary / "state.json").write_text(json.dumps(state, indent=2, allow_nan=False) + "\n")
    for path in [*files, temporary / "state.json", temporary]:
        fsync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    fsync(root)
    return final


def newest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its state; younger broken ones are named, with the reason, and removed."""
    for temporary in root.glob(".step-*.tmp"):  # a kill while writing: never was a checkpoint
        shutil.rmtree(temporary)
    broken: list[str] = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        fault = _fault(folder)
        if fault is None:
            for reason in broken:
                warn(f"{reason}; going on from {folder.name} instead")
            return folder, json.loads((folder / "state.json").read_text())
        broken.append(f"checkpoint {folder} is not whole: {fault}")
        shutil.rmtree(folder)
    for reason in broken:
        warn(f"{reason}; there is no older one, starting from the first step")
    return None


def _fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    try:
        state = json.loads((folder / "state.json").read_text())
        listed: dict[str, int] = state["files"]
    except FileNotFoundError:
        return "state.json is missing"
    except (ValueError, KeyError) as e:
        return f"state.json cannot be read ({e!r})"
    for name, expected in listed.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != expected:
            return f"{name} has {found} bytes, expected {expected}" if found is not None else f"{name} is missing"
    return None


def prune(root: Path, keep: int, best: int | None) -> None:
    """Keep the `keep` newest checkpoints and that of step `best`."""
    folders = sorted(root.glob("step-*"))
    for folder in folders[:-keep]:
        if best is None or folder != step_folder(root, best):
            shutil.rmtree(folder)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """AdamW's moments under the names of their parameters."""
    state = optimizer.state
    return {
        f"{kind}.{name}": state[p][kind]
        for name, p in model.named_parameters()
        if p in state
        for kind in ("exp_avg", "exp_avg_sq")
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """Put the moments back. Raises EyasError naming parameters without moments, or of another shape."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        moments = {kind: tensors.get(f"{kind}.{name}") for kind in ("exp_avg", "exp_avg_sq")}
        for kind, m in moments.items():
            if m is None or m.shape != p.shape:
                found = "nothing" if m is None else str(tuple(m.shape))
                raise EyasError(f"checkpoint: {kind} of {name}: expected shape {tuple(p.shape)}, found {found}")
        device = {k: m.to(p.device) for k, m in moments.items() if m is not None}
        optimizer.state[p] = {"step": torch.tensor(float(step), device=p.device), **device}


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "optimizer.safetensors")
