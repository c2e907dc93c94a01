"""Samples for a training script of one's own: dataset and collate function, under the names this field uses.

A sample of T tokens becomes T-1 rows: row t has the target's aux states at token t, and of token t+1 the id, the
mask bit and the last hidden state. A batch is one row of packed samples, [1, max_len, ...].
"""

import json
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from eyas.errors import EyasError
from eyas.features.contract import Features
from eyas.features.foreign import layer_list, load
from eyas.features.store import Store
from eyas.train.noise import TransformTensors

BatchType = dict[str, Any]
StandardizeFnSig = Callable[[dict[str, Any]], dict[str, Any]]


def list_files(path: str | Path) -> list[Path]:
    """Every file below `path` whose name ends in "pt", sorted."""
    return sorted(p for p in Path(path).rglob("*pt") if p.is_file())


def split_files(datapath: str | Path, ratio: float = 0.9, seed: int = 0) -> tuple[list[Path], list[Path]]:
    """(training, validation) files: shuffled by `seed`, the first `ratio` of them for training."""
    files = list_files(datapath)
    random.Random(seed).shuffle(files)
    count = int(len(files) * ratio)
    return files[:count], files[count:]


def slice_and_pad_to_length(tensor: Tensor, length: int) -> Tensor:
    """[T, ...] -> [length, ...]: cut at the end, or filled up with zeros."""
    kept = tensor[:length]
    return torch.cat([kept, kept.new_zeros(length - len(kept), *kept.shape[1:])])


def shift_batch(batch: BatchType) -> BatchType:
    """T tokens -> T-1 rows: states keep rows 0…T-2; tokens, last states, mask and positions rows 1…T-1. Raises
    KeyError when one of these, or `lengths` [1], is missing."""
    after = ("input_ids", "verifier_last_hidden_states", "loss_mask", "position_ids")
    rows = {k: batch[k][1:] for k in after} | {"hidden_states": batch["hidden_states"][:-1]}
    return rows | {"lengths": (batch["lengths"] - 1).clamp(min=0)}


def standardize_data_v0(data: dict[str, Any]) -> dict[str, Any]:
    """Old sample files: `hidden_state` [T, A*H] (aux) and `target` [T, H] (last, AFTER the final norm)."""
    states = {"hidden_states": data["hidden_state"], "verifier_last_hidden_states": data["target"]}
    return states | {k: data[k] for k in ("input_ids", "loss_mask")}


def standardize_data_v1(data: dict[str, Any]) -> dict[str, Any]:
    """Sample files with `hidden_states`, a list of A+1 tensors [T, H]: aux, then last (BEFORE the final norm)."""
    *aux, last = layer_list(data["hidden_states"], "sample")
    states = {"hidden_states": torch.cat(aux, -1), "verifier_last_hidden_states": last}
    return states | {k: data[k] for k in ("input_ids", "loss_mask")}


class Eagle3SampleFileDataset(Dataset[BatchType]):
    """Shifted samples from a feature store (`datapath` holds `store.json`) or from `.pt` files (one sample each).

    `[i]` is a dict of `hidden_states` [T-1, A*H] and `verifier_last_hidden_states` [T-1, H] in
    `hidden_states_dtype`, `input_ids` [T-1] int64, `loss_mask` [T-1], `position_ids` [T-1] (1…T-1), `lengths` [1].
    A store keeps the last states of supervised tokens only: other rows are zeros here, and no target.

    Either `datapath` or `file_list` is given (else ValueError). `transform`, such as `AddGaussianNoise()`, comes
    before the shift; `standardize_fn` makes a file's dict the four tensors. Samples stay whole, whatever
    `max_len`: `create_collate_fn(max_len)` cuts.
    """

    def __init__(
        self,
        max_len: int,
        datapath: str | Path | None = None,
        file_list: Sequence[str | Path] | None = None,
        transform: TransformTensors | None = None,
        hidden_states_dtype: torch.dtype = torch.float32,
        standardize_fn: StandardizeFnSig = standardize_data_v1,
    ):
        if (datapath is None) == (file_list is None):
            raise ValueError("give either datapath or file_list")
        self.max_len, self.transform, self.hidden_states_dtype = max_len, transform, hidden_states_dtype
        self.standardize_fn, self.store = standardize_fn, None
        self.files = [Path(f) for f in file_list or []]
        if datapath and (Path(datapath) / "store.json").is_file():
            self.store = Store(datapath)
        elif datapath:
            self.files = list_files(datapath)
        if not len(self):
            raise EyasError(f"{datapath or 'file_list'} holds no samples", "expected a store or .pt files")

    def __len__(self) -> int:
        return len(self.files) if self.store is None else len(self.store)

    def __getitem__(self, index: int) -> BatchType:
        data = self._from_file(self.files[index]) if self.store is None else self._from_store(self.store[index])
        for key in ("hidden_states", "verifier_last_hidden_states"):
            # a copy, never a view: a loader's worker that sends a view would send the whole memory-mapped shard
            data[key] = data[key].to(self.hidden_states_dtype, copy=True)
        tokens = len(data["input_ids"])
        data |= {"lengths": torch.tensor([tokens]), "position_ids": torch.arange(tokens)}
        return shift_batch(self.transform(data) if self.transform else data)

    def _from_store(self, features: Features) -> dict[str, Any]:
        last = torch.zeros_like(features.aux_hidden_states[:, 0])  # [T, H]
        last[features.loss_mask] = features.last_hidden_state
        states = {"hidden_states": features.aux_hidden_states.flatten(1), "verifier_last_hidden_states": last}
        return states | {"input_ids": features.token_ids.long(), "loss_mask": features.loss_mask.clone()}

    def _from_file(self, path: Path) -> dict[str, Any]:
        raw = load(path)
        try:
            return self.standardize_fn(raw)
        except KeyError as e:
            raise EyasError(f"{path} has no key {e} but {sorted(raw)}", "choose its standardize_fn") from e

    @cached_property
    def approx_lengths(self) -> list[int]:
        """Rows of each sample: exact for a store or with a `sample_lengths.json`, else guessed by file size."""
        if self.store is not None:
            return (self.store.lengths - 1).tolist()
        table = self.files[0].parent / "sample_lengths.json"
        if table.is_file():
            known, numbers = json.loads(table.read_text()), [f.stem.rpartition("_")[2] for f in self.files]
            if absent := [n for n in numbers if n not in known]:
                raise EyasError(f"{table} has no entry for sample {absent[0]}", "delete it, or write it anew")
            return [int(known[n]) - 1 for n in numbers]
        rows, size = len(self[0]["input_ids"]), self.files[0].stat().st_size
        return [round(rows * f.stat().st_size / size) for f in self.files]


def create_collate_fn(max_len: int) -> Callable[[list[BatchType]], BatchType]:
    """A function that packs samples into one batch: each key [1, max_len, ...], zeros after the last sample.
    `lengths` [n] are the rows of each: the sample that crosses `max_len` is cut, later ones are left out."""

    def collate(samples: list[BatchType]) -> BatchType:
        ends = torch.cat([s["lengths"] for s in samples]).cumsum(0).clamp(max=max_len)
        lengths = ends.diff(prepend=ends.new_zeros(1))
        joined = {k: torch.cat([s[k] for s in samples]) for k in samples[0].keys() - {"lengths"}}
        batch = {k: slice_and_pad_to_length(rows, max_len)[None] for k, rows in joined.items()}
        return {**batch, "lengths": lengths[lengths > 0]}

    return collate
