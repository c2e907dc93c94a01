"""A folder's safetensors shards, by header: which tensor is where, without reading any."""

import difflib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from eyas.errors import EyasError

AGAIN = "a Git LFS pointer or a broken download? Fetch the model again"
BLOCK, TENSORS = 1 << 12, 512  # bytes from the middle of up to so many tensors of a shard go into its mark


@dataclass(frozen=True)
class Shards:
    """`where[tensor name]` is (file, header entry {"dtype", "shape", "data_offsets"})."""

    folder: Path
    files: list[Path]
    where: dict[str, tuple[Path, dict[str, Any]]]

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Read every header: of the indexed shards, the single file, or all there are. Raises EyasError."""
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        elif (folder / "model.safetensors").is_file():
            names = {"model.safetensors"}
        else:
            names = {p.name for p in folder.glob("*.safetensors")}
        if not names:
            raise EyasError(f"{folder} has no *.safetensors file", "convert the weights with `save_pretrained`")
        files = [folder / name for name in sorted(names)]
        return cls(
            folder, files, {name: (file, entry) for file in files for name, entry in read_header(file).items()}
        )

    def ending(self, suffix: str) -> list[str]:
        """Tensor names that are `suffix` or end with `.suffix`."""
        return sorted(k for k in self.where if k == suffix or k.endswith("." + suffix))

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as stored. Raises EyasError listing close names."""
        if name not in self.where:
            close = self.ending(".".join(name.split(".")[-2:])) + difflib.get_close_matches(name, self.where)
            raise EyasError(f"{self.folder}: no tensor {name!r}; close names: {', '.join(close[:6]) or 'none'}")
        with safe_open(self.where[name][0], framework="pt") as f:
            return f.get_tensor(name)

    def dtype(self) -> str:
        """torch's name for the type that most tensors have, for configs that name none."""
        kinds = [entry["dtype"] for _, entry in self.where.values()]
        return {"F32": "float32", "F16": "float16"}.get(max(kinds, key=kinds.count), "bfloat16")

    def mark(self, file: Path) -> str:
        """Hash of a shard's size, header, and a block of each of its tensors: cheap even for a terabyte."""
        spans = sorted(entry["data_offsets"] for own, entry in self.where.values() if own == file)
        with open(file, "rb") as f:
            length = f.read(8)
            header = f.read(int.from_bytes(length, "little"))
            marked = hashlib.sha256(str(file.stat().st_size).encode() + length + header)
            for begin, end in spans[:: -(-len(spans) // TENSORS) or 1]:
                f.seek(8 + len(header) + begin + max(0, (end - begin - BLOCK) // 2))
                marked.update(f.read(min(BLOCK, end - begin)))
            return marked.hexdigest()


def read_header(path: Path, hint: str = AGAIN) -> dict[str, Any]:
    """Entries of a safetensors file's header, checked against the file's size. Raises EyasError with `hint`."""
    if not path.is_file():
        raise EyasError(f"{path} is named in the index but is not there", hint)
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        text = f.read(length) if length < size else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise EyasError(f"{path} ({size} bytes) has no readable safetensors header", hint) from e
    if size != expected:
        raise EyasError(f"{path} has {size} bytes, its header says {expected}", hint)
    return header
