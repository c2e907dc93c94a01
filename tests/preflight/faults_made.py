# ruff: noqa: E501  (a fault a line)
"""Faults of what the stages have made: prepare's samples, the feature store, the vocabulary."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.features.contract import Features
from eyas.features.store import Store
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from tests.preflight.faults import Fault, base, cut, each, edit_json, head, manifest, samples, setting, store

PARQUET, SHARD = "run/prepare/samples.parquet", "run/extract/features/train/shard-00000.safetensors"


def row(**values: Any):
    return each(lambda r: r.update({k: v(r) for k, v in values.items()}))


def roll(mask: list, by: int) -> list:
    return np.roll(mask, by).tolist()


def first(**values: Any):
    """A change of one sample's columns."""
    return lambda listed: listed[0].update({k: v(listed[0]) for k, v in values.items()})


def leak(listed: list[dict]) -> None:
    one = next(r for r in listed if r["split"] == "heldout")
    one["prompt_ids"] = next(r for r in listed if r["split"] == "train")["prompt_ids"]


def repeat(listed: list[dict]) -> None:
    listed[5] |= {k: listed[4][k] for k in ("token_ids", "loss_mask")}


def other_answers(config: RunConfig) -> None:
    path = Path(config.run_dir) / "regenerate" / "conversations.jsonl"
    path.write_text(path.read_text().replace('"token_ids": [', '"token_ids": [300, '))


def other_tokenizer(config: RunConfig) -> None:
    path = Path(config.target.model) / "chat_template.jinja"
    path.write_text(path.read_text() + " ")


def aux(change):
    """A change of the aux states [T, A, H]."""
    return lambda f: replace(f, aux_hidden_states=change(f.aux_hidden_states).contiguous())


def last(change):
    return lambda f: replace(f, last_hidden_state=change(f.last_hidden_state).contiguous())


def shifted_mask(f: Features) -> Features:
    return replace(f, loss_mask=f.loss_mask.roll(-1))


def swapped_id(f: Features) -> Features:
    ids = f.token_ids.clone()
    ids[3] = 7
    return replace(f, token_ids=ids)


def raw(name: str, place: tuple, value: float):
    """A value in the shard's bytes, past the checks of the writer."""

    def spoil(config: RunConfig) -> None:
        path = base(config) / SHARD
        tensors = load_file(path)
        tensors[name][place] = value
        save_file(tensors, path)
        (shard,) = json.loads((path.parent / "store.json").read_text())["shards"]
        head(shards=[shard | {"bytes": path.stat().st_size}])(config)

    return spoil


def constant(f: Features) -> Features:
    return aux(lambda a: a[:1].expand_as(a))(f)


def flat_row(f: Features) -> Features:
    states = f.aux_hidden_states.clone()
    states[2, 0] = 1.0
    return replace(f, aux_hidden_states=states)


def layer_is(one: int, two: int):
    def change(a: torch.Tensor) -> torch.Tensor:
        a[:, one] = a[:, two]
        return a

    return aux(change)


def captured_at(*layers: int, by: float = 0.0):
    """Aux states really of other boundaries; `by`: of a target whose weights differ by this much."""

    def spoil(config: RunConfig) -> None:
        target = Target.load(TargetSpec.load(config.target.model))
        torch.manual_seed(0)
        for p in target.model.model.layers.parameters() if by else ():
            p.data += by * p.std() * torch.randn_like(p)

        def change(f: Features) -> Features:
            (states,) = target.capture([f.token_ids.tolist()], list(layers))
            return Features.from_states(f.id, f.token_ids, f.loss_mask, states.aux, states.last)

        for split in ("train", "heldout"):
            store(change, split)(config)

    return spoil


def counted_as_outputs(config: RunConfig) -> RunConfig:
    captured_at(2, 3, 4)(config)
    for split in ("train", "heldout"):
        head(split, aux_layers=[1, 2, 3])(config)
    return setting(extract={"aux_layers": [1, 2, 3]})(config)


def parts(count: int, order: list[int]):
    return lambda x: x.unflatten(-1, (count, -1))[..., order, :].flatten(-2)


def normed(config: RunConfig) -> None:
    norm = TargetWeights(TargetSpec.load(config.target.model)).final_norm()
    store(last(norm))(config)


def fewer(config: RunConfig) -> None:
    edit_json(
        Path(config.run_dir) / "prepare" / "manifest.json", counts={"train": 40, "samples": 44, "tokens": 2000}
    )


def heldout_again(config: RunConfig) -> None:
    other = Store(Path(config.run_dir) / "extract" / "features" / "train")
    folder = Path(config.run_dir) / "extract" / "features" / "heldout"
    ids = [other.ids[0], *Store(folder).ids[1:]]
    head("heldout", ids=ids)(config)


def one_split_id(config: RunConfig) -> None:
    heldout_again(config)


def tables(change):
    """A change of (d2t, t2d) on disk; None removes one."""

    def spoil(config: RunConfig) -> None:
        path = Path(config.run_dir) / "vocab" / "vocab.safetensors"
        found = load_numpy(path)
        found |= change(found["d2t"].copy(), found["t2d"].copy())
        save_numpy({k: v for k, v in found.items() if v is not None}, path)

    return spoil


def keep(ids: np.ndarray) -> dict[str, np.ndarray]:
    t2d = np.zeros(320, dtype=np.bool_)
    t2d[ids] = True
    return {"d2t": np.sort(ids) - np.arange(len(ids)), "t2d": t2d}


def at(table: np.ndarray, place: int, value: Any) -> np.ndarray:
    table[place] = value
    return table


def of_other_data(config: RunConfig) -> None:
    """280 ids, but not those that are spoken."""
    listed = Store(Path(config.run_dir) / "extract" / "features" / "train").spread(64)
    tokens = torch.cat([f.token_ids[f.loss_mask] for f in listed]).long()
    rank = tokens.bincount(minlength=320).numpy()
    rank[2] = 0  # the end-of-turn token is kept
    tables(lambda d, t: keep(np.sort(np.argsort(rank, kind="stable")[:280])))(config)


def no_tables(config: RunConfig) -> None:
    (Path(config.run_dir) / "vocab" / "vocab.safetensors").unlink()


def too_dear(fault: Fault) -> Fault:
    """The same with a target that is too large to be run: then it shows in how the head predicts."""
    return replace(fault, name=f"{fault.name}, and a large target", stage="alignment", skip=["recomputed"])


EXTRACT, PREPARE, VOCAB = "extract again", "run `eyas prepare` again", "run `eyas vocab` again"
NORMED = Fault(
    "a last state that is normed already",
    "features",
    normed,
    "the last hidden state is post_final_norm, declared is pre_final_norm",
    EXTRACT,
)
EARLY = Fault(
    "last states a row early",
    "features",
    store(last(lambda x: x.roll(-1, 0))),
    "the last hidden state is boundary 6's, but shifted by one: row p holds token p+1's",
    EXTRACT,
)
LATE = Fault(
    "last states a row late",
    "features",
    store(last(lambda x: x.roll(1, 0))),
    "shifted by one: row p holds token p-1's",
    EXTRACT,
)
HALVES = Fault(
    "halves of the last state in the wrong order",
    "features",
    store(last(parts(2, [1, 0]))),
    "the last hidden state is boundary 6's, but its 2 parts are in the order [1, 0]",
    EXTRACT,
)
QUARTERS = Fault(
    "quarters of the last state in the wrong order",
    "features",
    store(last(parts(4, [2, 0, 3, 1]))),
    "its 4 parts are in the order",
    EXTRACT,
)
# fmt: off
FAULTS = [
    Fault("a mask of zeros", "data", samples(first(loss_mask=lambda r: [False] * len(r["loss_mask"]))), "samples.parquet: sample c0: expected a supervised token", PREPARE),
    Fault("masks a token late", "data", samples(row(loss_mask=lambda r: roll(r["loss_mask"], 1))), "sample c0 (regenerate/conversations.jsonl row 1): the loss mask is shifted by one to the right", PREPARE),
    Fault("masks a token early", "data", samples(row(loss_mask=lambda r: roll(r["loss_mask"], -1))), "loss masks are shifted left by one: in sample c0", "move mask and ids together"),
    Fault("one mask a token late", "data", samples(first(loss_mask=lambda r: roll(r["loss_mask"], 1))), "sample c0 (regenerate/conversations.jsonl row 1): the loss mask is shifted by one to the right", PREPARE),
    Fault("one mask bit wrong", "data", samples(first(loss_mask=lambda r: [True, *r["loss_mask"][1:]])), "the loss mask differs at 1 tokens, first at token 0: it is 1, expected 0", PREPARE),
    Fault("end-of-turn tokens left out", "data", samples(row(loss_mask=lambda r: [m and t != 2 for m, t in zip(r["loss_mask"], r["token_ids"], strict=True)])), "end-of-turn tokens are not supervised: in sample c0", "never propose an end", "warning"),
    Fault("supervised prompts", "data", samples(row(loss_mask=lambda r: [True] * len(r["loss_mask"]))), "100.0% of the tokens are supervised", "data.supervise", "warning"),
    Fault("ids beyond the vocabulary", "data", samples(first(token_ids=lambda r: [*r["token_ids"][:-1], 320])), "token 51 is 320, the target knows ids below 320", "do not belong together"),
    Fault("a cut Parquet file", "data", cut(PARQUET, 40), "samples.parquet: not a readable samples file", PREPARE),
    Fault("another tokenizer since", "data", other_tokenizer, "weights, tokenizer or chat template differ", PREPARE),
    Fault("another length since", "data", setting(data={"max_length": 100}), "was made with data.max_length 160, the config says 100", PREPARE),
    Fault("other turns supervised since", "data", setting(data={"supervise": "last_turn"}), "was made with data.supervise all_turns, the config says last_turn", PREPARE),
    Fault("other answers since", "data", other_answers, "rendered now", "source, tokenizer or chat template changed"),
    Fault("a held-out prompt that is trained on", "data", samples(leak), "1 first prompts are on both sides of the split", "it splits by the first prompt"),
    Fault("a sample twice", "data", samples(repeat), "1 of 30 samples repeat another, such as c", "prepare drops rows", "warning"),
    Fault("two begin tokens", "data", samples(row(token_ids=lambda r: [1, *r["token_ids"]], loss_mask=lambda r: [False, *r["loss_mask"]])), "30 of 30 samples begin with two begin tokens, such as c0", "let the chat template write one", "warning"),
    Fault("a store that is gone", "features", lambda c: (base(c) / "run/extract/features/train/store.json").unlink(), "has no store.json", "was extraction finished?"),
    Fault("a store that is not complete", "features", head(complete=False), "is not complete: 26 samples", "finish extraction"),
    Fault("a cut shard", "features", cut(SHARD, 8), "shard-00000.safetensors has", "copy it again"),
    Fault("features of another target", "features", head(target_fingerprint="0" * 64), "target_fingerprint is '0000", "extract again with this target"),
    Fault("features of other layers", "features", store(aux_layers=(1, 2, 5)), "aux_layers is (1, 2, 5), expected (1, 3, 5)", "extract again with this target"),
    Fault("NaN in a state", "features", raw("aux_hidden_states", (3, 1, 0), float("nan")), "aux_hidden_states of layer 3 at token 3 is NaN", "float16 overflows"),
    Fault("infinity in a state", "features", raw("last_hidden_state", (0, 5), float("inf")), "is infinite in bfloat16", "float16 overflows"),
    Fault("a state of zeros", "features", raw("aux_hidden_states", (2, 0), 0.0), "aux_hidden_states of layer 1 at token 2 is all zeros", "float16 overflows"),
    Fault("a state of one value", "features", store(flat_row), "aux layer 1: 8 rows have one value in all channels, the first at sample", EXTRACT),
    Fault("the same state for every token", "features", store(aux(lambda a: torch.ones_like(a))), "aux layer 1: the same state at every token", EXTRACT),
    Fault("a layer twice", "features", store(layer_is(1, 0)), "aux layer 1 and aux layer 3 hold the same states", "check the layer ids"),
    Fault("an aux layer that is the last", "features", captured_at(1, 3, 6), "aux layer 5 and the last hidden state hold the same states", "check the layer ids"),
    Fault("layers swapped", "features", store(aux(lambda a: a[:, [2, 1, 0]])), "declared [1, 3, 5], but hold boundaries [5, 3, 1]: stored in another order", EXTRACT),
    Fault("layers a block late", "features", captured_at(2, 4, 5), "declared [1, 3, 5], but hold boundaries [2, 4, 5]", EXTRACT),
    Fault("layers counted as outputs", "features", counted_as_outputs, "every one is one block later: they were counted as outputs of blocks", EXTRACT),
    Fault("aux states a row late", "features", store(aux(lambda a: a.roll(1, 0))), "aux column 0 is boundary 1's, but shifted by one: row p holds token p-1's", EXTRACT),
    Fault("tensor-parallel halves of aux states", "features", store(aux(parts(2, [1, 0]))), "aux column 0 is boundary 1's, but its 2 parts are in the order [1, 0]", EXTRACT),
    Fault("states of a revision not far off", "features", captured_at(1, 3, 5, by=0.008), "the stored states differ from the target's own by ", "another revision, a quantised engine", "warning"),
    Fault("states of another revision", "features", captured_at(1, 3, 5, by=0.5), "states of other tokens, another revision or another target", EXTRACT),
    NORMED, EARLY, LATE, HALVES, QUARTERS,
    Fault("a token that changed on the way", "features", store(swapped_id), "token 3 is 7 in the store", "extract again from the ids"),
    Fault("a mask that moved on the way", "features", store(shifted_mask), "the store's loss mask is shifted by one to the left against prepare's", EXTRACT),
    Fault("samples that got lost", "features", fewer, "holds 26 samples and skipped 0; prepare made 40", "run `eyas extract` again"),
    Fault("features of other samples", "features", manifest("extract", prepare="0" * 64), "was extracted from other samples (digest 000000000000", "run `eyas extract` again"),
    Fault("a held-out sample that is trained on", "features", heldout_again, "1 samples are in both training and held out, such as c", "run `eyas prepare`"),
    replace(too_dear(NORMED), says="looks already normed, but is declared pre_final_norm"),
    replace(too_dear(EARLY), says="the last hidden state is shifted by one: row p holds token p+1's", cure="row p must be token p's"),
    replace(too_dear(LATE), says="the last hidden state is shifted by one: row p holds token p-1's", cure="row p must be token p's"),
    replace(too_dear(HALVES), says="only as: 2 parts of the hidden dimension (tensor-parallel ranks) read in the order [1, 0]", cure="extract again with that put right"),
    replace(too_dear(QUARTERS), says="only as: 4 parts of the hidden dimension", cure="extract again with that put right"),
    too_dear(Fault("a raw last state declared normed", "", head(last_hidden_state="post_final_norm"), "the last hidden state was never normed, but is declared post_final_norm", "let store.json say what they really are")),
    too_dear(Fault("another head", "", head(head_fingerprint="0" * 64), "were made with another lm_head or final norm", "extract again with this target")),
    too_dear(Fault("states that the head does not know", "", store(last(lambda x: x.flip(-1))), "lm_head does not predict the stored answers", "the aux states fit tokens and head")),
    too_dear(Fault("aux states a row early", "", store(aux(lambda a: a.roll(-1, 0))), "aux layer 5 is shifted by one against the last hidden state", "row p of every tensor")),
    Fault("micro-batches that end before any answer", "dry_run", setting(train={"batch_tokens": 16}), "train.batch_tokens 16 cuts samples before", "nothing would be learnt from them"),
    Fault("no draft vocabulary", "vocab", no_tables, "vocab.safetensors is missing: vocab.size 280 of the target's 320 needs it", VOCAB),
    Fault("a cut table", "vocab", cut("run/vocab/vocab.safetensors", 16), "vocab.safetensors (", VOCAB),
    Fault("ids instead of offsets", "vocab", tables(lambda d, t: {"d2t": d + np.arange(len(d))}), "d2t: draft row", "these are target ids, not offsets"),
    Fault("an id twice", "vocab", tables(lambda d, t: {"d2t": at(d, 7, d[6] - 1)}), "d2t: draft rows 6 and 7 both decode to target id", "d2t holds offsets"),
    Fault("an id out of range", "vocab", tables(lambda d, t: {"d2t": at(d, 279, 90)}), "draft row 279 decodes to target id 369, outside 0..319", "d2t holds offsets"),
    Fault("tables that disagree", "vocab", tables(lambda d, t: {"t2d": np.roll(t, 1)}), "not the same ids", "d2t holds offsets"),
    Fault("a table with two axes", "vocab", tables(lambda d, t: {"t2d": t[None]}), "t2d: expected 1-D bool of length 320, found bool of shape (1, 320)", VOCAB),
    Fault("only one table", "vocab", tables(lambda d, t: {"d2t": None}), "d2t is missing: a draft vocabulary needs both", VOCAB),
    Fault("a vocabulary of another size", "vocab", setting(vocab={"size": 200}), "maps 280 ids, vocab.size 200 asks for 200", "the table on disk is of another config"),
    Fault("no end-of-turn token in it", "vocab", tables(lambda d, t: keep(np.arange(40, 320))), "leaves out the end-of-turn token [2]", VOCAB),
    Fault("a vocabulary of other samples", "vocab", manifest("vocab", prepare="0" * 64), "was counted from other samples (digest 000000000000", VOCAB),
    Fault("a vocabulary of other data", "vocab", of_other_data, "100.0% when it was made: it was counted on other data", VOCAB),
]
# fmt: on
