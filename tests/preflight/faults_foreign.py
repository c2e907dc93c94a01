# ruff: noqa: E501  (a fault a line)
"""Faults of features that other tools wrote, looked at alone: `--features DIR --target TARGET`."""

import datetime
import fcntl
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.config import RunConfig
from eyas.preflight.finding import Subject
from tests.preflight.faults import Fault, base
from tests.preflight.foreign import write
from tests.tiny import make_target

LOCKED: list[Any] = []  # open files that hold a lock until the test is over


def files(kind: str, change=lambda d: d, after=lambda folder: None, layers=(1, 3, 5)):
    """A folder of that kind of files, spoilt; looked at with the run's target."""

    def spoil(config: RunConfig) -> Subject:
        folder = write(base(config) / "files", config, kind, change, layers)
        after(folder)
        return Subject(features=folder, target=config.target.model)

    return spoil


def put(**values: Any):
    """Other values of some keys, made from the file's dict."""
    return lambda d: d | {k: v(d) for k, v in values.items()}


def changed(key: str, change):
    def apply(d: dict[str, Any]) -> dict[str, Any]:
        value = [x.clone() for x in d[key]] if isinstance(d[key], list) else d[key].clone()
        return d | {key: change(value)}

    return apply


def cut(name: str, by: int = 200):
    def after(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-by])

    return after


def lock(folder: Path) -> None:
    held = open(folder / "hs_0.safetensors.lock", "w")  # noqa: SIM115
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    LOCKED.append(held)


def one_of_another_target(folder: Path) -> None:
    save_file({"token_ids": torch.arange(9), "hidden_states": torch.rand(9, 4, 16)}, folder / "hs_3.safetensors")


def nan_at(states: torch.Tensor) -> torch.Tensor:
    states[4, 1, 0] = float("nan")
    return states


def beyond(ids: torch.Tensor) -> torch.Tensor:
    ids[2] = 320
    return ids


def short_by_a_block(d: dict[str, Any]) -> dict[str, Any]:
    return d | {"hidden_states": d["hidden_states"][16:]}


def nothing(config: RunConfig) -> Subject:
    (base(config) / "files").mkdir()
    return Subject(features=base(config) / "files", target=config.target.model)


def narrow(config: RunConfig) -> Subject:
    folder = make_target(base(config) / "narrow", hidden_size=16)
    return Subject(features=write(base(config) / "files", config, "vllm"), target=str(folder))


def other_weights(config: RunConfig) -> Subject:
    """A target that has the same shape and tokenizer: another revision."""
    folder = make_target(base(config) / "revision", seed=1)
    return Subject(features=write(base(config) / "files", config, "vllm"), target=str(folder))


def other_tokenizer(config: RunConfig) -> Subject:
    """Ids that another tokenizer would give: the target was run on them, and does not know such text."""
    from tests.preflight import foreign

    kept, order = foreign.Store, torch.randperm(320, generator=torch.Generator().manual_seed(0))

    class Permuted(kept):  # what the writer reads its ids from
        def __getitem__(self, i):
            f = super().__getitem__(i)
            object.__setattr__(f, "token_ids", order[f.token_ids.long()].int())
            return f

    foreign.Store = Permuted
    try:
        folder = write(base(config) / "files", config, "vllm")
    finally:
        foreign.Store = kept
    return Subject(features=folder, target=config.target.model)


def in_a_run(config: RunConfig) -> Subject:
    folder = write(base(config) / "files", config, "vllm", layers=(1, 5))
    return Subject(config, features=folder)


POSES, V1, VLLM = "a single layer poses as all of them", "speculators_v1", "vllm"
SERVER, AGAIN = "ask the server for the aux layers and the last", "write this file again"
# fmt: off
FAULTS = [
    Fault("v1: one layer for the list", "features", files(V1, put(hidden_states=lambda d: d["hidden_states"][0])), f", 32] where a list of tensors [T, H], the aux layers and then the last one, is due: {POSES}", "save every layer"),
    Fault("v1: a list of one layer", "features", files(V1, put(hidden_states=lambda d: d["hidden_states"][:1])), POSES, "behind them the last hidden state"),
    Fault("v1: the list stacked", "features", files(V1, put(hidden_states=lambda d: torch.stack(d["hidden_states"]))), "hidden_states is one tensor [4, ", "save the list itself"),
    Fault("v1: a batch axis", "features", files(V1, changed("hidden_states", lambda x: [y[None] for y in x])), "expected [T, H] for each", "remove a batch axis"),
    Fault("v1: a layer of another sample", "features", files(V1, changed("hidden_states", lambda x: [x[0][:-3], *x[1:]])), "hidden_states[0] is [", "take all layers from one forward pass"),
    Fault("v1: the last state among the aux layers", "features", files(V1, changed("hidden_states", lambda x: [x[0], x[1], x[3], x[2]])), "the last hidden state is boundary 5's, the target's own last one is boundary 6's", "capture boundary 6 too"),
    Fault("v1: the same, and a large target", "alignment", files(V1, changed("hidden_states", lambda x: [x[0], x[1], x[3], x[2]])), "the highest aux layer predicts the stored answers better", "are they swapped?", skip=["recomputed"]),
    Fault("v1: more ids than states", "features", files(V1, changed("input_ids", lambda x: torch.cat([x, x[:1]]))), "data_0.pt has ", AGAIN),
    Fault("v1: a mask of zeros", "features", files(V1, changed("loss_mask", torch.zeros_like)), "data_0.pt: loss_mask is all zero", "see how it was made"),
    Fault("v1: a cut file", "features", files(V1, after=cut("data_0.pt")), "data_0.pt cannot be read: ", AGAIN),
    Fault("v1: more than tensors", "features", files(V1, put(when=lambda d: datetime.date(2026, 1, 1))), "data_0.pt cannot be read: it holds more than tensors", "eyas runs no code from a file"),
    Fault("v1: a list, not a dict", "features", files(V1, lambda d: [d["input_ids"]]), "data_0.pt holds a list, expected a dict", "one dict for each sample"),
    Fault("v0: one layer", "features", files("speculators_v0", put(hidden_state=lambda d: d["target"])), f"hidden_state is [127, 32] beside a last state [127, 32] where [T, A * 32] is due: {POSES}", "save the aux layers side by side"),
    Fault("SpecForge: one layer", "features", files("specforge", put(aux_hidden_state=lambda d: d["hidden_state"])), POSES, "lowest first"),
    Fault("SpecForge: a width that is no multiple", "features", files("specforge", changed("aux_hidden_state", lambda x: x[..., :-1])), "expected [T, A * H] beside [T, H]", AGAIN),
    Fault("vLLM: one layer", "features", files(VLLM, changed("hidden_states", lambda x: x[:, -1])), f"hs_0.safetensors: hidden_states is [127, 32] where [127, A + 1, 32] is due: {POSES}", SERVER),
    Fault("vLLM: a list of one layer", "features", files(VLLM, changed("hidden_states", lambda x: x[:, -1:])), f"hidden_states is [127, 1, 32] where [127, A + 1, 32] is due: {POSES}", SERVER),
    Fault("vLLM: layers before tokens", "features", files(VLLM, changed("hidden_states", lambda x: x.transpose(0, 1))), "hidden_states is [4, 127, 32], expected [127 tokens, layers, hidden]", "permute the axes"),
    Fault("vLLM: a cached block left out", "features", files(VLLM, short_by_a_block), "16 rows, whole blocks of 16, were left to the server's prefix cache", "--no-enable-prefix-caching"),
    Fault("vLLM: a cut file", "features", files(VLLM, after=cut("hs_0.safetensors")), "hs_0.safetensors has ", AGAIN),
    Fault("vLLM: a file that is still written", "features", files(VLLM, after=lock), "hs_0.safetensors is still being written", "wait for it"),
    Fault("vLLM: two targets in a folder", "features", files(VLLM, after=one_of_another_target), "mixes features: hs_0.safetensors is vLLM hidden states, 3 aux layers of 32", "one folder for each target"),
    Fault("vLLM: NaN", "features", files(VLLM, changed("hidden_states", nan_at)), "hs_0.safetensors: aux column 1 at token 4 is NaN", AGAIN),
    Fault("vLLM: ids beyond the vocabulary", "features", files(VLLM, changed("token_ids", beyond)), "token 2 is 320, the target knows ids below 320", "tokenised for another target"),
    Fault("vLLM: layers high to low", "features", files(VLLM, changed("hidden_states", lambda x: x[:, [2, 1, 0, 3]])), "stored in the order [5, 3, 1]", "put them in order"),
    Fault("vLLM: integers for states", "features", files(VLLM, changed("hidden_states", lambda x: x.to(torch.int8))), "the states are torch.int8", "save them as bfloat16"),
    Fault("vLLM: another target's width", "features", narrow, "hs_0.safetensors: states of hidden size 32, the target's is 16", "another target's"),
    Fault("vLLM: another revision's states", "features", other_weights, "states of other tokens, another revision or another target", "give the layers it really captured"),
    Fault("vLLM: another tokenizer's ids", "alignment", other_tokenizer, "the target's lm_head does not predict the stored answers", "another tokenizer"),
    Fault("vLLM: fewer layers than the run asks for", "features", in_a_run, "2 aux layers and the last state, extract.aux_layers asks for [1, 3, 5]", "capture these layers"),
    Fault("keys of no format", "features", files(VLLM, lambda d: {"logits": d["hidden_states"]}), "has the keys ['logits'], of no format known here", "speculators v1: hidden_states, input_ids, loss_mask"),
    Fault("no files at all", "features", nothing, "holds neither store.json nor *.pt", "was extraction finished?"),
]
# fmt: on
