"""A trained draft on disk: `model.safetensors` (tensors by server names), `draft.json` (shape, provenance)."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.draft.config import Eagle3DraftConfig
from eyas.draft.model import Eagle3DraftModel
from eyas.errors import EyasError
from eyas.files import atomic, write_json
from eyas.target.weights import TargetWeights

KIND = {"format": "eyas-draft", "version": 1, "method": "eagle3"}


def save_draft(model: Eagle3DraftModel, folder: Path, provenance: dict[str, Any] | None = None) -> None:
    """Write the draft in the dtype of its parameters, `draft.json` last. Nothing of the target is stored."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with atomic(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(folder / "draft.json", KIND | {"config": model.config.to_dict(), "provenance": provenance or {}})


def load_draft(folder: Path, weights: TargetWeights) -> Eagle3DraftModel:
    """The saved draft with its target, on the CPU in its stored dtype, in evaluation mode.

    Raises EyasError listing every missing, unexpected or wrongly shaped tensor, and naming what is no eyas draft.
    """
    path, about = folder / "model.safetensors", folder / "draft.json"
    try:
        described = json.loads(about.read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise EyasError(f"{about} cannot be read: {e}", "give the folder of a trained draft") from e
    if (found := {key: described.get(key) for key in KIND}) != KIND:
        raise EyasError(f"{about} is no draft of this version: found {found}, expected {KIND}")
    config = Eagle3DraftConfig.from_dict(described["config"])
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as e:
        raise EyasError(f"{path} cannot be read: {e}", "train the draft again, or copy it whole") from e
    model = Eagle3DraftModel(config, tensors.get("t2d"), tensors.get("d2t"))
    shapes, expected = ({n: list(t.shape) for n, t in held.items()} for held in (tensors, model.state_dict()))
    faults = [f"missing {name}" for name in sorted(expected.keys() - shapes.keys())]
    faults += [f"unexpected {name}" for name in sorted(shapes.keys() - expected.keys())]
    both = [n for n in expected if n in shapes]
    faults += [f"{n} is {shapes[n]}, expected {expected[n]}" for n in both if shapes[n] != expected[n]]
    if faults:
        raise EyasError(f"{path} does not hold this draft's tensors: {'; '.join(faults)}")
    model.load_state_dict(tensors, assign=True)
    model.load_target(weights)
    return model.eval()
