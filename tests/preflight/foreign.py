"""The healthy run's samples as files of other tools, as these tools write them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.config import RunConfig
from eyas.features.store import Store
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights


def states(config: RunConfig, layers: tuple[int, ...] = (1, 3, 5)) -> list[dict[str, Tensor]]:
    """ids [T], mask [T], aux [T, A, H] and last [T, H] before the norm, of some samples."""
    spec = TargetSpec.load(config.target.model)
    target = Target.load(spec)
    made = []
    for f in Store(Path(config.run_dir) / "extract" / "features" / "train").spread(6):
        (c,) = target.capture([f.token_ids.tolist()], list(layers))
        one = {"ids": f.token_ids.long(), "mask": f.loss_mask.clone()}
        made.append(one | {"aux": c.aux.bfloat16(), "last": c.last.bfloat16()})
    return made


def speculators_v1(s: dict[str, Tensor]) -> dict[str, Any]:
    layers = [*s["aux"].unbind(1), s["last"]]
    return {"input_ids": s["ids"], "loss_mask": s["mask"].long(), "hidden_states": [x.clone() for x in layers]}


def speculators_v0(s: dict[str, Tensor], norm=lambda x: x) -> dict[str, Any]:
    about = {"input_ids": s["ids"], "loss_mask": s["mask"].long()}
    return about | {"hidden_state": s["aux"].flatten(1).float(), "target": norm(s["last"]).float()}


def specforge(s: dict[str, Tensor], norm=lambda x: x) -> dict[str, Any]:
    about = {"input_ids": s["ids"], "loss_mask": s["mask"].long()}
    return about | {"aux_hidden_state": s["aux"].flatten(1)[None], "hidden_state": norm(s["last"])[None]}


def model_optimizer(s: dict[str, Tensor]) -> dict[str, Any]:
    about = {"input_ids": s["ids"], "loss_mask": s["mask"], "conversation_id": "a"}
    return about | {"aux_hidden_states": s["aux"].flatten(1), "hidden_states": s["last"]}


def vllm(s: dict[str, Tensor]) -> dict[str, Any]:
    return {"token_ids": s["ids"], "hidden_states": torch.cat([s["aux"], s["last"][:, None]], 1)}


WRITERS = {
    "speculators_v1": (speculators_v1, "data_{}.pt"),
    "speculators_v0": (speculators_v0, "data_{}.pt"),
    "specforge": (specforge, "rows_0-2000/data_{}.ckpt"),
    "model_optimizer": (model_optimizer, "conversation-{}.pt"),
    "vllm": (vllm, "hs_{}.safetensors"),
}
POST_NORM = {"speculators_v0", "specforge"}  # the tools that keep the state behind the final norm


def write(folder: Path, config: RunConfig, kind: str, change=lambda data: data, layers=(1, 3, 5)) -> Path:
    """A folder of sample files, each passed through `change` (None leaves the file out)."""
    make, name = WRITERS[kind]
    norm = TargetWeights(TargetSpec.load(config.target.model)).final_norm()
    options = {"norm": norm} if kind in POST_NORM else {}
    for i, s in enumerate(states(config, layers)):
        path = folder / name.format(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = change(make(s, **options))
        if path.suffix == ".safetensors":
            save_file({k: v.contiguous() for k, v in data.items()}, path)
        else:
            torch.save(data, path)
    return folder
