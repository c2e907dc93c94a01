"""The feature store: a folder of safetensors shards and one `store.json` (format: docs/feature-store.md).

Shards hold the rows of many samples one after the other, with offsets; any sample is a few slices of a memory map.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.features.contract import AXES, DTYPES, FeatureMeta, Features
from eyas.files import atomic, sha256_file, write_json

FORMAT, VERSION = "eyas-features", 1
AGAIN = "copy it again, or extract again"
_ST_NAMES = {torch.int32: "I32", torch.bool: "BOOL", torch.bfloat16: "BF16"}


class StoreWriter:
    """Write samples in order; a shard is in memory twice while it is written. `store.json` is written after each
    and says `complete` only at the end. A writer on a killed one's folder goes on after the last finished shard:
    `ids` and `skipped` are the samples dealt with already."""

    def __init__(self, folder: str | Path, meta: FeatureMeta, shard_bytes: int):
        self.folder, self.meta, self.shard_bytes = Path(folder), meta, shard_bytes
        self.shards: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.skipped: list[dict[str, str]] = []
        if (self.folder / "store.json").is_file():
            head, found = _read_head(self.folder)
            if found != meta:
                raise EyasError(f"{self.folder} holds other features: {_difference(asdict(found), asdict(meta))}")
            self.shards, self.ids, self.skipped = head["shards"], head["ids"], head["skipped"]
        self._known = set(self.ids)
        self._pending: list[Features] = []
        self._pending_bytes = 0

    def add(self, features: Features) -> None:
        """Validate and append one sample. Raises BadFeatures; EyasError for an id that is stored already."""
        if features.id in self._known:
            raise EyasError(f"sample id {features.id} occurs twice")
        self._pending.append(features.validate(self.meta))
        self._known.add(features.id)
        self._pending_bytes += sum(getattr(features, name).nbytes for name in AXES)
        if self._pending_bytes >= self.shard_bytes:
            self._finish_shard()

    def skip(self, id: str, reason: str) -> None:
        """Note a sample that is left out, and why."""
        self.skipped.append({"id": id, "reason": reason})

    def close(self) -> "Store":
        """Write the last shard and declare the store complete."""
        if self._pending:
            self._finish_shard()
        self._write_head(complete=True)
        return Store(self.folder)

    def _finish_shard(self) -> None:
        parts = {name: [getattr(f, name) for f in self._pending] for name in AXES}
        tensors = {name: torch.cat(rows) for name, rows in parts.items()}
        for offsets, name in (("offsets", "token_ids"), ("last_offsets", "last_hidden_state")):
            tensors[offsets] = torch.tensor([0, *map(len, parts[name])]).cumsum(0)
        path = self.folder / f"shard-{len(self.shards):05d}.safetensors"
        with atomic(path) as temporary:
            save_file(tensors, temporary, {"format": f"{FORMAT} {VERSION}"})
        shard = {"file": path.name, "sha256": sha256_file(path), "bytes": path.stat().st_size}
        shard |= {"samples": len(self._pending), "tokens": len(tensors["token_ids"])}
        self.shards.append(shard | {"supervised": len(tensors["last_hidden_state"])})
        self.ids += [f.id for f in self._pending]
        self._pending, self._pending_bytes = [], 0
        self._write_head(complete=False)

    def _write_head(self, complete: bool) -> None:
        head = {"format": FORMAT, "version": VERSION, "complete": complete, **asdict(self.meta), "axes": AXES}
        head |= {k: sum(s[k] for s in self.shards) for k in ("samples", "tokens", "supervised", "bytes")}
        write_json(self.folder / "store.json", head | {k: getattr(self, k) for k in ("shards", "skipped", "ids")})


class Store:
    """Read a store. Opening reads `store.json` and the shards' sizes; `store[i]` reads that sample's bytes only.

    `meta` says what the features are; `ids`, `lengths` (tokens) and `supervised_counts` (int64 numpy) tell about
    each sample. Raises EyasError naming the file, what was found and what was expected.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        head, self.meta = _read_head(self.folder)
        if not head["complete"]:
            raise EyasError(f"{self.folder} is not complete: {len(head['ids'])} samples", "finish extraction")
        self.shards: list[dict[str, Any]] = head["shards"]
        self.ids: list[str] = head["ids"]
        self.skipped: list[dict[str, str]] = head["skipped"]
        self._starts = np.cumsum([0] + [s["samples"] for s in self.shards])  # first sample of each shard
        self._open: dict[int, tuple[Any, np.ndarray, np.ndarray]] = {}
        if len(self.ids) != self._starts[-1]:
            raise EyasError(f"{self.folder}: {len(self.ids)} ids, but {self._starts[-1]} samples in the shards")
        for shard in self.shards:
            path = self.folder / shard["file"]
            size = path.stat().st_size if path.is_file() else 0
            if size != shard["bytes"]:
                raise EyasError(f"{path} has {size} bytes, expected {shard['bytes']}", AGAIN)

    def __len__(self) -> int:
        return len(self.ids)

    def spread(self, most: int) -> list[Features]:
        """At most `most` samples, evenly spaced over the store."""
        count = min(most, len(self))
        return [self[i * len(self) // count] for i in range(count)]

    def __getitem__(self, index: int) -> Features:
        """Sample `index`, validated. Its tensors are views of the memory map: clone what you keep or send away."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        file, offsets, last_offsets = self._shard(number)
        row = index - self._starts[number]
        tokens, last = (slice(int(o[row]), int(o[row + 1])) for o in (offsets, last_offsets))
        rows = {n: file.get_slice(n)[last if n == "last_hidden_state" else tokens] for n in AXES}
        path = self.folder / self.shards[number]["file"]
        return Features(self.ids[index], **rows).validate(self.meta, f"{path}: ")

    @property
    def lengths(self) -> np.ndarray:
        return self._counts(1)

    @property
    def supervised_counts(self) -> np.ndarray:
        return self._counts(2)

    def _counts(self, which: int) -> np.ndarray:
        ends = [self._shard(number)[which] for number in range(len(self.shards))]
        return np.concatenate([np.zeros(0, np.int64), *map(np.diff, ends)])

    def check(self, **expected: Any) -> None:
        """Compare fields of `meta` with what the caller works with. Raises EyasError naming every difference."""
        expected = {k: tuple(v) if isinstance(v, list) else v for k, v in expected.items()}
        if difference := _difference({k: getattr(self.meta, k) for k in expected}, expected):
            raise EyasError(f"{self.folder}: {difference}", "extract again with this target and config")

    def _shard(self, number: int) -> tuple[Any, np.ndarray, np.ndarray]:
        """(file, offsets, last_offsets) of a shard, opened and checked at its first use."""
        if number in self._open:
            return self._open[number]
        shard = self.shards[number]
        path, tokens, supervised = self.folder / shard["file"], shard["tokens"], shard["supervised"]
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as e:
            raise EyasError(f"{path} is not a whole safetensors file: {e}", AGAIN) from e
        want = {n: (s, _ST_NAMES[DTYPES[n]]) for n, s in self.meta.shapes(tokens, supervised).items()}
        want |= dict.fromkeys(("offsets", "last_offsets"), ([shard["samples"] + 1], "I64"))
        parts = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
        found = {name: (part.get_shape(), part.get_dtype()) for name, part in parts}
        if difference := _difference(found, want):
            raise EyasError(f"{path}: {difference} (axes {AXES})")
        offsets, last_offsets = (file.get_tensor(n).numpy() for n in ("offsets", "last_offsets"))
        for ends, total in ((offsets, tokens), (last_offsets, supervised)):
            if ends[0] != 0 or ends[-1] != total or (np.diff(ends) < 0).any():
                raise EyasError(f"{path}: offsets must rise from 0 to {total}, found {ends}")
        self._open[number] = file, offsets, last_offsets
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # a spawned process maps the shards anew


def _read_head(folder: Path) -> tuple[dict[str, Any], FeatureMeta]:
    path = folder / "store.json"
    try:
        head = json.loads(path.read_text())
    except FileNotFoundError:
        raise EyasError(
            f"{folder} has no store.json: it is no feature store", "was extraction finished?"
        ) from None
    except json.JSONDecodeError as e:
        raise EyasError(f"{path} is not valid JSON: {e}", "extract again") from e
    want: dict[str, Any] = {"format": FORMAT, "version": VERSION, "axes": AXES}
    if difference := _difference({k: head[k] for k in want if k in head}, want):
        raise EyasError(f"{path}: {difference}")
    names = [f.name for f in fields(FeatureMeta)]
    if missing := {"complete", "shards", "ids", "skipped", *names} - head.keys():
        raise EyasError(f"{path} lacks {', '.join(sorted(missing))}")
    return head, FeatureMeta(**{name: head[name] for name in names})


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    pairs = {n: (found.get(n, "absent"), expected.get(n, "absent")) for n in (expected | found)}
    return "; ".join(f"{n} is {f!r}, expected {e!r}" for n, (f, e) in pairs.items() if f != e)
