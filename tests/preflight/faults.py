"""The table of faults: what is done to a healthy run, which stage must find it first, and what it must say.

The table itself is in the faults_*.py files beside this one; `make faults` makes each and prints what is found.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.config import RunConfig
from eyas.features.contract import FeatureMeta, Features
from eyas.features.store import Store, StoreWriter
from eyas.preflight.finding import Subject
from eyas.preflight.runner import run_preflight
from tests.preflight.healthy import CHECKED, copy_of


@dataclass(frozen=True)
class Fault:
    """`spoil(config)` changes the copy of the run and may return another config, or a Subject."""

    name: str
    stage: str
    spoil: Callable[[RunConfig], Any]
    says: str  # part of the finding's message: names file, field or value
    cure: str  # part of its hint
    level: str = "error"
    skip: list[str] = field(default_factory=list)  # checks left out, such as those too dear for a large target

    def found(self, healthy: RunConfig, folder: Path) -> tuple[str, dict[str, Any]]:
        """(stage, finding) of the first one that says it; runs no stage after the one that must find it. A stage
        that fails before is the answer too."""
        config = copy_of(healthy, folder)
        subject = self.spoil(config) or config
        stages = CHECKED[: CHECKED.index(self.stage) + 1]
        try:
            result = run_preflight(subject, stages, self.skip)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        every = [(s["name"], f) for s in result["stages"] for f in s["findings"]]
        for stage, f in every:
            if f["level"] == "error" or (f["level"] == self.level and self.says in f["message"]):
                return stage, f
        return "", {
            "message": "\n".join(f"{s} {f['level']} {f['message']}" for s, f in every),
            "hint": "",
            "level": "",
        }


def setting(**sections: Any) -> Callable[[RunConfig], RunConfig]:
    """A change of config values: setting(train={"lr": 10})."""

    def change(config: RunConfig) -> RunConfig:
        raw = config.model_dump(mode="json")
        for name, values in sections.items():
            raw[name] = raw[name] | values if isinstance(values, dict) else values
        return RunConfig.parse(raw)

    return change


def base(config: RunConfig) -> Path:
    return Path(config.run_dir).parent


def edit_json(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def target(**values: Any) -> Callable[[RunConfig], None]:
    """A change of the target's config.json."""
    return lambda config: edit_json(Path(config.target.model) / "config.json", **values)


def template(text: str) -> Callable[[RunConfig], RunConfig]:
    """Another chat template, and answers as they are in the data."""

    def change(config: RunConfig) -> RunConfig:
        (Path(config.target.model) / "chat_template.jinja").write_text(text)
        return setting(regenerate={"mode": "none"})(config)

    return change


def rows(change: Callable[[int, dict], Any]) -> Callable[[RunConfig], RunConfig]:
    """`change(i, row)` every row of the data (text is written as it is); answers as they are in the data."""

    def spoil(config: RunConfig) -> RunConfig:
        path = base(config) / "data.jsonl"
        made = [change(i, json.loads(line)) for i, line in enumerate(path.read_text().splitlines())]
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in made))
        return setting(regenerate={"mode": "none"})(config)

    return spoil


def said(content: Any, **more: Any) -> Callable[[int, dict], dict]:
    """Another first answer."""

    def change(i: int, row: dict) -> dict:
        row["messages"][1] = {"role": "assistant", "content": content, **more}
        return row

    return change


def samples(change: Callable[[list[dict]], Any], noted: dict | None = None) -> Callable[[RunConfig], None]:
    """`change` the rows of samples.parquet, without the checks of the writer; `noted` updates its metadata."""

    def spoil(config: RunConfig) -> None:
        path = Path(config.run_dir) / "prepare" / "samples.parquet"
        table = pq.read_table(path)
        listed = table.to_pylist()
        change(listed)
        about = json.loads(table.schema.metadata[b"eyas"]) | (noted or {})
        schema = table.schema.with_metadata({"eyas": json.dumps(about)})
        pq.write_table(pa.Table.from_pylist(listed, schema), path, row_group_size=16)

    return spoil


def each(change: Callable[[dict], Any]) -> Callable[[list[dict]], None]:
    def all_of(listed: list[dict]) -> None:
        for row in listed:
            change(row)

    return all_of


def store(
    change: Callable[[Features], Features] = lambda f: f, split: str = "train", **meta: Any
) -> Callable[[RunConfig], None]:
    """The store written anew, each sample changed, its head saying something else."""

    def spoil(config: RunConfig) -> None:
        folder = Path(config.run_dir) / "extract" / "features" / split
        old = Store(folder)
        listed = [change(clone(old[i])) for i in range(len(old))]
        about = FeatureMeta(**(vars(old.meta) | meta))
        shutil.rmtree(folder)
        writer = StoreWriter(folder, about, 1 << 20)
        for f in listed:
            writer.add(f)
        writer.close()

    return spoil


def clone(f: Features) -> Features:
    tensors = {k: v.clone() for k, v in vars(f).items() if k != "id"}
    return Features(f.id, **tensors)


def head(split: str = "train", **values: Any) -> Callable[[RunConfig], None]:
    """Other values in store.json."""
    return lambda c: edit_json(Path(c.run_dir) / "extract" / "features" / split / "store.json", **values)


def cut(path: str, by: int) -> Callable[[RunConfig], None]:
    """A file that lost its end; `path` below the run's parent."""

    def spoil(config: RunConfig) -> None:
        file = base(config) / path
        file.write_bytes(file.read_bytes()[:-by])

    return spoil


def manifest(stage: str, **inputs: str) -> Callable[[RunConfig], None]:
    return lambda c: edit_json(Path(c.run_dir) / stage / "manifest.json", inputs=inputs)


def of_features(folder: str, **options: Any) -> Callable[[RunConfig], Subject]:
    """A subject that is the folder of files alone, with the run's target."""
    return lambda c: Subject(features=base(c) / folder, **({"target": c.target.model} | options))
