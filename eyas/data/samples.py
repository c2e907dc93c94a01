"""`samples.parquet`: what prepare hands to the stages behind it, checked when written and when read."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import EyasError
from eyas.files import atomic

FORMAT, AGAIN = "eyas-samples-1", "run `eyas prepare` again"
LOOK = 8  # row groups (of 1024 samples) looked at where not all are read
_KINDS = {"token_ids": np.dtype(np.int32), "loss_mask": np.dtype(np.bool_), "prompt_ids": np.dtype(np.int32)}


@dataclass(frozen=True)
class Sample:
    """One rendered conversation. `prompt_ids`: its first user turn with the generation prompt, for decoding; the
    samples of one conversation share it, and it is empty where no user speaks."""

    id: str
    split: str  # train | heldout
    category: str | None
    token_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool, True on supervised tokens
    prompt_ids: np.ndarray  # [P] int32
    source: str = ""
    row: int = 0

    def __post_init__(self):
        for name, kind in _KINDS.items():
            found = getattr(self, name)
            if found.dtype != kind or found.ndim != 1:
                self._refuse(f"{name}: expected 1-D {kind}, found {found.ndim}-D {found.dtype}")
        if len(self.token_ids) != len(self.loss_mask):
            self._refuse(f"{len(self.token_ids)} token ids, but {len(self.loss_mask)} loss mask entries")
        if not self.loss_mask.any():
            self._refuse(f"expected a supervised token, found none among {len(self.token_ids)}")
        if self.token_ids.min() < 0 or self.split not in ("train", "heldout"):
            self._refuse(f"least token id {self.token_ids.min()}, split {self.split!r} (train or heldout)")

    def _refuse(self, why: str):
        raise EyasError(f"sample {self.id}: {why}")


def write_samples(path: Path, samples: Iterable[Sample], metadata: dict[str, Any]) -> None:
    """Stream samples into a Parquet file, whole or absent; `metadata` is kept as JSON beside the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    integers = pa.list_(pa.int32())
    types = {"id": pa.string(), "split": pa.string(), "category": pa.string(), "token_ids": integers}
    types |= {"loss_mask": pa.list_(pa.bool_()), "prompt_ids": integers, "source": pa.string(), "row": pa.int64()}
    schema = pa.schema(types, {"eyas": json.dumps({"format": FORMAT} | metadata)})
    samples = iter(samples)
    with atomic(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        while rows := [vars(sample) for sample in islice(samples, 1024)]:
            writer.write_table(pa.Table.from_pylist(rows, schema))


def read_metadata(path: Path) -> dict[str, Any]:
    """What prepare noted about tokenizer, target and options. Raises EyasError where `path` is not its work."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        noted = json.loads((pq.read_schema(path).metadata or {}).get(b"eyas", b"{}"))
    except (pa.ArrowException, OSError) as e:
        raise EyasError(f"{path}: not a readable samples file: {e}", AGAIN) from e
    if (found := noted.get("format")) != FORMAT:
        raise EyasError(f"{path}: expected format {FORMAT}, found {found}", AGAIN)
    return noted


def read_samples(path: Path, split: str | None = None, target: Any = None) -> list[Sample]:
    """The samples of one split (or all), in order; those made for another `target` (TargetSpec) are refused."""
    noted = read_metadata(path)
    if target is not None:
        check_target(path, noted, target)
    return [s for s in _read(path) if split in (None, s.split)]


def check_target(path: Path, noted: dict[str, Any], target: Any) -> None:
    """Raise EyasError where the samples were made for another target (TargetSpec)."""
    if noted["target_fingerprint"] != target.fingerprint:
        made, wanted = noted["target_fingerprint"][:12], f"{target.name} ({target.fingerprint[:12]})"
        differ = "weights, tokenizer or chat template differ"
        raise EyasError(f"{path} was prepared for {noted['target']} ({made}), not {wanted}: {differ}", AGAIN)


@dataclass(frozen=True)
class Prepared:
    """A part of a samples file: `samples` of its `total`, in order, and what prepare noted."""

    path: Path
    noted: dict[str, Any]
    total: int
    samples: list[Sample]


def look_into(path: Path) -> Prepared:
    """At most LOOK row groups, evenly spaced over the file: some thousand samples, however large it is."""
    import pyarrow.parquet as pq

    noted, about = read_metadata(path), pq.read_metadata(path)
    count = min(LOOK, about.num_row_groups)
    chosen = [i * about.num_row_groups // count for i in range(count)]
    return Prepared(path, noted, about.num_rows, list(_read(path, chosen)))


def _read(path: Path, row_groups: list[int] | None = None) -> Iterator[Sample]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(1024, row_groups):
        columns = batch.drop_columns([*_KINDS]).to_pydict() | {
            n: batch[n].to_numpy(zero_copy_only=False) for n in _KINDS
        }
        for values in zip(*columns.values(), strict=True):
            try:
                yield Sample(**dict(zip(columns, values, strict=True)))
            except EyasError as e:
                raise EyasError(f"{path}: {e.message}", AGAIN) from e
