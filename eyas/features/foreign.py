"""Feature files of other tools, one sample a file, told apart by what is in them.

None of them says which layers the aux states are of, nor, reliably, whether the last state is before or after the
final norm: both stay unknown here, and `eyas preflight` finds them out with the target. Nothing is unpickled but
tensors and plain containers.
"""

import fcntl
import gzip
import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.errors import EyasError
from eyas.features.contract import BadFeatures, Features, bad_row
from eyas.features.store import Store
from eyas.target.shards import read_header

# What each kind of file holds; the first whose keys are all there is the kind.
FORMATS = {
    "vLLM hidden states": ("hidden_states", "token_ids"),
    "SpecForge": ("aux_hidden_state", "hidden_state", "input_ids", "loss_mask"),
    "Model-Optimizer": ("aux_hidden_states", "hidden_states", "input_ids"),
    "speculators v0": ("hidden_state", "target", "input_ids", "loss_mask"),
    "speculators v1": ("hidden_states", "input_ids", "loss_mask"),
}
SUFFIXES = (".pt", ".ckpt", ".ckpt.gz", ".safetensors")
NO_SAMPLES = {"token_freq.pt", "vocab_mapping.pt", "training_state.pt"}  # lie beside samples
AGAIN = "write this file again"
SERVER = "extract with --no-enable-prefix-caching, and compare rows with tokens for every file"


class Raw(NamedTuple):
    """A sample as its file has it, but for axes in the order of the contract and without a batch axis."""

    format: str
    token_ids: Tensor  # [T]
    loss_mask: Tensor | None  # [T]; None: the file has none
    aux: Tensor  # [T, A, H]
    last: Tensor  # [T, H]

    def signature(self) -> str:
        return f"{self.format}, {self.aux.shape[1]} aux layers of {self.aux.shape[2]}, {self.aux.dtype}"


@dataclass(frozen=True)
class Foreign:
    """A folder of sample files. `ids` are their paths in it."""

    folder: Path
    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, id: str) -> Raw:
        return parse(path := self.folder / id, load(path))

    def spread(self, most: int) -> list[Features]:
        """At most `most` samples, evenly spaced. Without a loss mask all tokens count as supervised."""
        return [self.sample(id) for id in self.some(most)]

    def some(self, most: int) -> list[str]:
        count = min(most, len(self))
        return [self.ids[i * len(self) // count] for i in range(count)]

    def sample(self, id: str) -> Features:
        raw = self.read(id)
        mask = torch.ones(len(raw.token_ids)) if raw.loss_mask is None else raw.loss_mask
        return Features.from_states(id, raw.token_ids, mask.bool(), raw.aux, raw.last)


def open_features(folder: Path) -> Store | Foreign:
    """A feature store (or the folder that holds its `train`), or files of another tool. Raises EyasError."""
    for place in (folder, folder / "train", folder / "features" / "train"):
        if (place / "store.json").is_file():
            return Store(place)
    if not folder.is_dir():
        raise EyasError(f"{folder} is not a folder", "give the folder of a feature store, or of sample files")
    paths = [p for p in folder.rglob("*") if p.name.endswith(SUFFIXES) and p.name not in NO_SAMPLES]
    if not paths:
        known = f"neither store.json nor {', '.join('*' + s for s in SUFFIXES)}"
        raise EyasError(f"{folder} holds {known}: no features", "was extraction finished?")
    return Foreign(folder, sorted(str(p.relative_to(folder)) for p in paths))


def load(path: Path) -> dict[str, Any]:
    """The file's dict, memory-mapped where that can be. Raises EyasError for one that is broken, still being
    written, or holds more than tensors and plain containers."""
    _check_lock(path)
    try:
        if path.suffix == ".safetensors":
            read_header(path, AGAIN)
            return load_file(path)
        source: Any = io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path
        raw = torch.load(source, weights_only=True, map_location="cpu", mmap=source is path)
    except pickle.UnpicklingError as e:
        hint = "save tensors, lists, numbers and text only; eyas runs no code from a file"
        what = re.search(r"GLOBAL (\S+)", str(e))
        said = f" ({what[1]})" if what else ""
        raise EyasError(f"{path} cannot be read: it holds more than tensors{said}", hint) from e
    except (RuntimeError, OSError, EOFError) as e:
        size = f"; it has {path.stat().st_size:,} bytes: cut short?" if path.is_file() else ""
        raise EyasError(f"{path} cannot be read: {str(e).splitlines()[0]}{size}", AGAIN) from e
    if not isinstance(raw, dict):
        raise EyasError(
            f"{path} holds a {type(raw).__name__}, expected a dict of tensors", "one dict for each sample"
        )
    return raw


def _check_lock(path: Path) -> None:
    """vLLM's connector holds `<file>.lock` while it writes the file."""
    lock = path.with_name(path.name + ".lock")
    if not lock.is_file():
        return
    with open(lock) as f:
        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError(f"{path} is still being written: {lock.name} is held", "wait for it") from None


def parse(path: Path, data: dict[str, Any]) -> Raw:
    """Tell the format by the keys and bring the tensors into the contract's form. Raises EyasError, which names a
    single layer that poses as all of them."""
    format = next((name for name, keys in FORMATS.items() if data.keys() >= {*keys}), None)
    if format is None:
        known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in FORMATS.items())
        raise EyasError(
            f"{path} has the keys {sorted(map(str, data))}, of no format known here", f"known: {known}"
        )
    ids = data["token_ids" if format == "vLLM hidden states" else "input_ids"].flatten()
    mask = data["loss_mask"].flatten() if "loss_mask" in data else None
    if format == "vLLM hidden states":
        aux, last = _stacked(path, data["hidden_states"], len(ids))
    elif format == "speculators v1":
        *layers, last = layer_list(data["hidden_states"], str(path))
        aux = torch.stack(layers, 1)
    else:
        names = {"SpecForge": ("aux_hidden_state", "hidden_state"), "speculators v0": ("hidden_state", "target")}
        wide, last = names.get(format, ("aux_hidden_states", "hidden_states"))
        aux, last = _wide(path, wide, data[wide], data[last])
    rows = {"loss_mask": len(ids) if mask is None else len(mask), "aux states": len(aux), "last state": len(last)}
    if set(rows.values()) != {len(ids)}:
        short = len(ids) - len(last)
        blocks = short > 0 and short % 16 == 0 and format == "vLLM hidden states"
        why = f": {short} rows, whole blocks of 16, were left to the server's prefix cache" if blocks else ""
        raise EyasError(f"{path} has {len(ids)} tokens, but rows: {rows}{why}", SERVER if blocks else AGAIN)
    return Raw(format, ids, mask, aux, last)


def layer_list(states: Any, where: str) -> list[Tensor]:
    """`hidden_states` of speculators v1, a list of A + 1 tensors [T, H]. Raises EyasError for anything else."""
    due = "where a list of tensors [T, H], the aux layers and then the last one, is due"
    if isinstance(states, Tensor):
        found = f"hidden_states is one tensor {list(states.shape)} {due}"
        if states.dim() == 2:
            hint = "save every layer: one taken alone is unpacked token by token, as if its rows were layers"
            raise EyasError(f"{where}: {found}: a single layer poses as all of them", hint)
        raise EyasError(
            f"{where}: {found}", "save the list itself: a stacked tensor is unpacked along its first axis"
        )
    shapes = [list(t.shape) for t in states]
    if len(states) < 2:
        text = f"hidden_states holds {len(states)} layer {shapes[:1]} {due}: a single layer poses as all of them"
        raise EyasError(f"{where}: {text}", "save the aux layers and behind them the last hidden state")
    for i, shape in enumerate(shapes):
        if len(shape) != 2 or shape != shapes[-1]:
            text = f"hidden_states[{i}] is {shape}, the last one {shapes[-1]}; expected [T, H] for each"
            raise EyasError(f"{where}: {text}", "remove a batch axis; take all layers from one forward pass")
    return list(states)


def _stacked(path: Path, states: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """[T, A + 1, H] of vLLM's connector."""
    found, shape = f"{path}: hidden_states is {list(states.shape)}", list(states.shape)
    if len(shape) == 2 or (len(shape) == 3 and shape[1] == 1):
        due = f"where [{tokens}, A + 1, {shape[-1]}] is due: a single layer poses as all of them"
        hint = "ask the server for the aux layers and the last: eagle_aux_hidden_state_layer_ids [2, 18, 33, 36]"
        raise EyasError(f"{found} {due}", hint)
    if len(shape) != 3 or (shape[0] != tokens and shape[1] == tokens):
        raise EyasError(f"{found}, expected [{tokens} tokens, layers, hidden]", "permute the axes when writing")
    return states[:, :-1], states[:, -1]


def _wide(path: Path, name: str, aux: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Aux states side by side, [T, A * H] or [1, T, A * H], and the last, [T, H] or [1, T, H]."""
    aux, last = (t[0] if t.dim() == 3 and len(t) == 1 else t for t in (aux, last))
    found = f"{path}: {name} is {list(aux.shape)} beside a last state {list(last.shape)}"
    if aux.dim() != 2 or last.dim() != 2 or aux.shape[1] % last.shape[1]:
        raise EyasError(f"{found}, expected [T, A * H] beside [T, H]", AGAIN)
    if aux.shape[1] == last.shape[1]:
        due = f"where [T, A * {last.shape[1]}] is due: a single layer poses as all of them"
        raise EyasError(f"{found} {due}", "save the aux layers side by side, lowest first")
    return aux.unflatten(1, (-1, last.shape[1])), last


def unlike(folder: Foreign, most: int) -> dict[str, str]:
    """What the sampled files are, by signature: the first file of each. More than one means a mixed folder."""
    found: dict[str, str] = {}
    for id in folder.some(most):
        found.setdefault(folder.read(id).signature(), id)
    return found


def rows_of(f: Features) -> None:
    """Raise BadFeatures for a row that is not finite, or all zero; `column` is a layer's place in the file."""
    for column, states in enumerate(f.aux_hidden_states.unbind(1)):
        if fault := bad_row(states):
            raise BadFeatures(f"{f.id}: aux column {column} at token {fault[0]} {fault[1]}", AGAIN)
    if fault := bad_row(f.last_hidden_state):
        token = int(f.loss_mask.nonzero()[fault[0]])
        raise BadFeatures(f"{f.id}: the last hidden state at token {token} {fault[1]}", AGAIN)
