"""Feature files of other tools, read without running any code in them."""

import fcntl
import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.errors import EyasError
from eyas.features.contract import POST_NORM, PRE_NORM
from eyas.progress import say


def read_foreign(path: str | Path) -> dict[str, Any]:
    """One sample of another tool: `format` is told by the file's keys (the same key holds different states!).

    speculators_v1 (`.pt`) and vllm (`.safetensors`) hold the last state before the final norm, speculators_v0
    (`.pt`) and specforge (`.ckpt`, `.ckpt.gz`) after it. None says which layers its aux states are of.

    Returns `format`, `token_ids` [T], `loss_mask` [T] bool (None for vllm), `aux_hidden_states` [T, A, H] low to
    high, `last_hidden_state` [T, H] and `last_hidden_state_norm` ("pre_final_norm" | "post_final_norm").
    `<file>.lock`, which vLLM holds while writing, is waited for. Raises EyasError naming the file where it is
    truncated, of unknown keys or uneven lengths, or would run code.
    """
    path = Path(path)
    data = _load_safetensors(path) if path.suffix == ".safetensors" else load_pickle(path)
    states, ids, mask = data.get("hidden_states"), data.get("input_ids"), data.get("loss_mask")
    if isinstance(states, list) and len(states) > 1:
        name, norm, aux, last = "speculators_v1", PRE_NORM, torch.stack(states[:-1], 1), states[-1]
    elif {"hidden_state", "target"} <= data.keys():
        name, norm, last = "speculators_v0", POST_NORM, data["target"]
        aux = data["hidden_state"].unflatten(-1, (-1, last.shape[-1]))
    elif {"hidden_state", "aux_hidden_state"} <= data.keys():
        name, norm, last = "specforge", POST_NORM, data["hidden_state"].squeeze(0)
        aux = data["aux_hidden_state"].squeeze(0).unflatten(-1, (-1, last.shape[-1]))
    elif isinstance(states, torch.Tensor) and states.dim() == 3 and "token_ids" in data:
        name, norm, aux, last, ids = "vllm", PRE_NORM, states[:, :-1], states[:, -1], data["token_ids"]
    else:
        raise EyasError(f"{path}: {sorted(data)} are not the keys of a feature file that eyas knows")
    if not isinstance(ids, torch.Tensor) or (mask is None and name != "vllm"):
        raise EyasError(f"{path}: a {name} file needs input_ids and loss_mask, found {sorted(data)}")
    rows = {"token_ids": len(ids), "aux_hidden_states": len(aux), "last_hidden_state": len(last)}
    rows |= {} if mask is None else {"loss_mask": len(mask)}
    if len(set(rows.values())) != 1:
        raise EyasError(f"{path}: tensors of one sample differ in length: {rows}")
    sample = {"format": name, "token_ids": ids, "loss_mask": None if mask is None else mask.bool()}
    return sample | {"aux_hidden_states": aux, "last_hidden_state": last, "last_hidden_state_norm": norm}


def load_pickle(path: str | Path) -> dict[str, Any]:
    """A `torch.save`d dict (gzipped or not), as a memory map where possible; code in it is refused (EyasError)."""
    try:
        gzipped = str(path).endswith(".gz")
        source = io.BytesIO(gzip.decompress(Path(path).read_bytes())) if gzipped else path
        data = torch.load(source, weights_only=True, map_location="cpu", mmap=not gzipped)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as e:
        hint = "the file is truncated, or holds more than tensors, which eyas does not load"
        raise EyasError(f"{path} cannot be read: {str(e).splitlines()[0]}", hint) from e
    if not isinstance(data, dict):
        raise EyasError(f"{path} holds a {type(data).__name__}, expected a dict")
    return data


def _load_safetensors(path: Path) -> dict[str, Any]:
    lock = path.with_name(path.name + ".lock")
    if lock.is_file():  # its writer holds it exclusively until the data file is complete, or until it dies
        with open(lock, "rb") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for {lock}")
                fcntl.flock(f, fcntl.LOCK_SH)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise EyasError(f"{path} cannot be read: {e}", "an interrupted copy? Fetch it again") from e
