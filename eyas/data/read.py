"""Rows of the conversation files, one at a time; a row that cannot be read is handed on as bad, not fatal."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError, UsageError
from eyas.pipeline import source_files


@dataclass(frozen=True)
class Row:
    """A JSON object, or the reason why there is none. `number` counts lines or rows of the file from 1."""

    file: str
    number: int
    value: dict[str, Any] | None = None
    error: str | None = None


def read_rows(sources: list[str]) -> Iterator[Row]:
    """Every row of JSONL, JSON and Parquet files (globs allowed) and hub datasets, in order. Raises UsageError for
    a missing file or an unknown kind, EyasError for a file that is broken as a whole."""
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    for name, path in source_files(sources).items():
        if path is not None and path.suffix not in readers:
            raise UsageError(f"{path}: unknown kind of file", f"expected one of {', '.join(readers)}")
        for number, value in readers[path.suffix](path) if path else _hub(name):
            yield _row(name, number, value)


def _row(file: str, number: int, value: Any) -> Row:
    if isinstance(value, ValueError):  # a line that is not JSON, or not UTF-8
        return Row(file, number, error=f"not valid JSON: {value}")
    if not isinstance(value, dict):
        return Row(file, number, error=f"expected an object, found {type(value).__name__}")
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return Row(file, number, error="holds half of a surrogate pair, which is not text")
    return Row(file, number, value)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    # Row by row: a reader that guesses column types fails on the first row whose `tool_calls` is not null.
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                if line.strip():
                    yield number, json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as e:
                yield number, ValueError("nested too deeply") if isinstance(e, RecursionError) else e


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(values, list):
            raise ValueError(f"expected a list of rows, found {type(values).__name__}")
    except ValueError as e:
        raise EyasError(f"{path}: {e}", "a file with one object a line must be named .jsonl") from e
    yield from enumerate(values, 1)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(path).iter_batches(256)
        yield from enumerate((value for batch in batches for value in batch.to_pylist()), 1)
    except (pa.ArrowException, OSError) as e:
        raise EyasError(f"{path}: not readable as Parquet: {e}") from e


def _hub(name: str) -> Iterator[tuple[int, Any]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split="train")
    except Exception as e:  # the library raises many kinds; whatever it was, the user must see it with the name
        hint = "give a public `org/name` with a train split, or a local file"
        raise EyasError(f"hub dataset {name}: {type(e).__name__}: {e}", hint) from e
    yield from enumerate(rows, 1)
