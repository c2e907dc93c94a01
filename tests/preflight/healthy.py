"""A healthy run over a tiny real target, made by the real stages as far as training; faults are made in copies."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eyas import pipeline
from eyas.config import RunConfig
from eyas.files import write_text
from eyas.preflight import runner
from tests.target.families import save_model
from tests.tiny import make_conversations, make_target

END = 2  # <|im_end|>
STAGES = ("regenerate", "prepare", "extract", "vocab")
CHECKED = runner.STAGES[runner.STAGES.index("config") :]  # what concerns a run; the machine has tests of its own


def make_healthy(folder: Path, family: str = "", shape: dict | None = None, **sections) -> RunConfig:
    """The run's config; everything lies below `folder`. `family`: an architecture of tests.target.families;
    `shape`: values of the target's own config."""
    model = make_target(folder / "target", **({} if family else shape or {}))
    if family:
        save_model(model, family, **({"vocab_size": 320, "num_hidden_layers": 6} | (shape or {})))
    elif not shape:  # a norm of ones would hide that it is missing
        tensors = load_file(model / "model.safetensors")
        norm = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = torch.linspace(0.3, 2.0, len(norm))
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    make_conversations(folder / "data.jsonl", 24)
    raw = {
        "run_dir": str(folder / "run"),
        "target": {"model": str(model)},
        "data": {"sources": [str(folder / "data.jsonl")], "heldout": 0.25, "max_length": 160},
        "regenerate": {"mode": "all", "max_new_tokens": 24, "temperature": 0.5},
        "extract": {"aux_layers": [1, 3, 5]},
        "vocab": {"size": 280},
        "train": {"ttt_steps": 3, "epochs": 3, "batch_tokens": 256, "lr": 1e-3},
        "evaluate": {"heldout_prompts": 3, "max_new_tokens": 12},
        "device": "cpu",
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values if isinstance(values, dict) else values
    config = RunConfig.parse(raw)
    for stage in pipeline.stages_of(config):
        if stage.name not in STAGES:
            continue
        pipeline._run_stage(stage, config, Path(config.run_dir))
        if stage.name == "regenerate":  # a random target seldom ends a turn
            end_turns(Path(config.run_dir) / "regenerate" / "conversations.jsonl")
    return config


def end_turns(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    for answer in (a for row in rows for a in row["answers"]):
        if answer["finish"] == "length":
            answer |= {"token_ids": [*answer["token_ids"], END], "finish": "stop"}
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def copy_of(config: RunConfig, folder: Path) -> RunConfig:
    """The same run elsewhere, its data and target with it: a copy to be spoilt."""
    base = Path(config.run_dir).parent
    shutil.copytree(base, folder, dirs_exist_ok=True)
    moved = json.loads(json.dumps(config.model_dump(mode="json")).replace(str(base), str(folder)))
    return RunConfig.parse(moved)
