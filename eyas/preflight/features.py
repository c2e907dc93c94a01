"""Features: is the folder whole, of one target, this target's, and do its states look like states?"""

from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import torch
from torch import Tensor

from eyas.features.contract import Features
from eyas.features.foreign import Foreign, rows_of, unlike
from eyas.features.store import Store
from eyas.pipeline import read_manifest
from eyas.preflight.finding import Check, Finding, NotMade, Subject, error, info, warning
from eyas.preflight.masks import edges, moved

MASSIVE = 1000.0  # a channel with a value this many times the median magnitude
SAME = 0.99  # share of equal values that makes two layers one
HEADERS = 64  # files of another tool whose shapes are compared


def folder_is_whole_and_fits(s: Subject) -> Iterator[Finding]:
    features = s.features
    yield from (of_a_store(s, features) if isinstance(features, Store) else of_other_tools(s, features))


def of_a_store(s: Subject, store: Store) -> Iterator[Finding]:
    expected = {}
    if s.target_name:
        expected = {"target_fingerprint": s.spec.fingerprint, "hidden_size": s.spec.hidden_size}
    if s.given_config:
        expected["aux_layers"] = s.aux_layers
    store.check(**expected)
    tokens, supervised = int(store.lengths.sum()), int(store.supervised_counts.sum())
    if not supervised:
        yield error(f"{store.folder} holds no supervised token", "see prepare's counts and examples")
        return
    share = supervised / tokens
    yield info(f"{len(store):,} samples, {tokens:,} tokens of {store.meta.target}, {share:.0%} supervised")
    if share >= 0.95:
        yield warning("prompts seem to be supervised too", "look at prepare's examples", {"share": share})
    if empty := int((store.supervised_counts == 0).sum()):
        yield warning(f"{empty} samples have no supervised token and teach nothing", "see prepare's counts")


def of_other_tools(s: Subject, files: Foreign) -> Iterator[Finding]:
    kinds = unlike(files, HEADERS)
    first, example = next(iter(kinds.items()))
    if len(kinds) > 1:
        other, path = list(kinds.items())[1]
        text = f"{files.folder} mixes features: {example} is {first}; {path} is {other}"
        yield error(text, "one folder for each target, tool and set of layers")
        return
    raw = files.read(example)
    count, size = raw.aux.shape[1:]
    hint = "such files do not say which layers, nor if the last state is before the final norm: name the --target"
    yield info(f"{len(files):,} files of {first}", hint)
    if not raw.aux.is_floating_point():
        yield error(f"{example}: the states are {raw.aux.dtype}, expected floating point", "save them as bfloat16")
    if raw.loss_mask is None:
        yield info("no loss mask in the files: every token is looked at")
    if s.target_name and size != s.spec.hidden_size:
        text = f"{example}: states of hidden size {size}, the target's is {s.spec.hidden_size}"
        yield error(text, "these are another target's")
    if s.given_config and count != len(s.aux_layers):
        text = f"{example}: {count} aux layers and the last state, extract.aux_layers asks for {s.aux_layers}"
        yield error(text, "capture these layers, or name those that are there")


def heldout_is_there(s: Subject) -> Iterator[Finding]:
    heldout = Store(s.folder("extract") / "features" / "heldout")
    if not heldout.supervised_counts.sum():
        yield warning("nothing is held out: the best step cannot be told", "set data.heldout above 0")
        return
    heldout.check(target_fingerprint=s.spec.fingerprint, aux_layers=s.aux_layers)
    if shared := set(heldout.ids) & set(s.store.ids):
        text = f"{len(shared)} samples are in both training and held out, such as {min(shared)}"
        yield error(text, "run `eyas prepare` and `eyas extract` again")


def samples_keep_the_contract(s: Subject) -> Iterator[Finding]:
    samples, foreign = s.samples, isinstance(s.features, Foreign)  # reading a store checks each row
    known = s.spec.vocab_size if s.target_name else None
    for f in samples:
        if foreign:
            rows_of(f)
            if not f.loss_mask.any():
                yield error(f"{f.id}: loss_mask is all zero: nothing to learn from it", "see how it was made")
        for at in ((f.token_ids < 0) | (f.token_ids >= (known or 1 << 30))).nonzero()[:1].flatten().tolist():
            text = f"token {at} is {int(f.token_ids[at])}, the target knows ids below {known}"
            yield error(f"sample {f.id}: {text}", "the data was tokenised for another target")
    tokens = sum(len(f.token_ids) for f in samples)
    yield info(f"{len(samples)} samples, {tokens:,} tokens: four tensors each, all rows finite and none zero")


def ids_and_masks_are_prepares(s: Subject) -> Iterator[Finding]:
    """What crosses the border between stages arrives as it left: ids, masks and their number."""
    if s.given_features:
        raise NotMade("the named features are of no run")
    prepared, store = s.prepared, s.store
    made = read_manifest(Path(s.config.run_dir) / "extract") or {}
    now = read_manifest(Path(s.config.run_dir) / "prepare") or {}
    if (then := made.get("inputs", {}).get("prepare")) and then != now.get("digest"):
        text = f"{store.folder} was extracted from other samples (digest {then[:12]}, now {now['digest'][:12]})"
        yield error(text, "run `eyas extract` again")
    count, place = now.get("counts", {}).get("train"), {id: i for i, id in enumerate(store.ids)}
    if count is not None and len(store) + len(store.skipped) != count:
        text = f"{store.folder} holds {len(store)} samples and skipped {len(store.skipped)}; prepare made {count}"
        yield error(text, "run `eyas extract` again")
    shared = [x for x in prepared.samples if x.id in place and x.split == "train"]
    for x in shared[:: -(-len(shared) // 16) or 1]:
        f = store[place[x.id]]
        ids, mask = f.token_ids.numpy(), f.loss_mask.numpy()
        if len(ids) != len(x.token_ids):
            yield error(
                f"sample {x.id} has {len(ids)} tokens in the store, {len(x.token_ids)} in prepare", "extract again"
            )
        elif (ids != x.token_ids).any():
            at = int((ids != x.token_ids).nonzero()[0][0])
            text = f"sample {x.id}: token {at} is {ids[at]} in the store, {x.token_ids[at]} in prepare"
            yield error(text, "extract again from the ids: text that is tokenised anew comes out otherwise")
        elif (mask != x.loss_mask).any():
            text = f"sample {x.id}: the store's loss mask {moved(mask, x.loss_mask)} against prepare's"
            yield error(text, "extract again: a mask is never moved apart from its ids")


def masks_end_with_the_turn(s: Subject) -> Iterator[Finding]:
    samples = [(f.id, f.token_ids.numpy(), f.loss_mask.numpy()) for f in s.samples]
    try:
        message = [{"role": "user", "content": "a"}]
        prompt = s.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        header = s.tokenizer(prompt, add_special_tokens=False)["input_ids"][-1]
    except Exception:  # no template, or one that raises what it likes: then a shift to the left is but a warning
        header = None
    yield edges(samples, set(s.spec.eos_token_ids), header)


def states_vary_by_token_and_layer(s: Subject) -> Iterator[Finding]:
    samples = s.samples
    layers = dict(zip(names(s), aux_of(samples), strict=True))
    last = torch.cat([f.last_hidden_state for f in samples]).float()
    places = [(f.id, t) for f in samples for t in range(len(f.token_ids))]
    rms: dict[str, float] = {}
    for name, states in (layers | {"last hidden state": last}).items():
        peak, rms[name] = states.abs().amax(0), float(states.square().mean().sqrt())  # [H]
        massive = (peak > MASSIVE * states.abs().median()).nonzero().flatten().tolist()
        text = f"{name}: RMS {rms[name]:.3g}, largest {peak.max():,.0f}, {len(massive)} massive channels"
        yield info(text, evidence={"rms": rms[name], "max": float(peak.max()), "massive": massive[:8]})
        if len(states) > 1 and bool((states == states[0]).all()):
            yield error(f"{name}: the same state at every token", "the engine gave one row for all; extract again")
        elif len(flat := (states == states[:, :1]).all(1).nonzero().flatten()):
            id, token = places[flat[0]] if name in layers else ("", int(flat[0]))
            where = f"sample {id} token {token}" if id else f"row {token}"
            text = f"{name}: {len(flat)} rows have one value in all channels, the first at {where}"
            yield error(text, "the buffer was never written there; extract again")
    supervised = torch.cat([f.loss_mask for f in samples])
    pairs = [(one, a, two, b) for (one, a), (two, b) in combinations(layers.items(), 2)]
    pairs += [(one, a[supervised], "the last hidden state", last) for one, a in layers.items() if not ends(s, one)]
    for one, a, two, b in pairs:
        # Counted by value, so that a few huge channels do not decide.
        share = float(torch.isclose(a, b, rtol=0.01, atol=0.0).float().mean())
        if share > SAME:
            text = f"{one} and {two} hold the same states ({share:.1%} of the values agree)"
            yield error(text, "check the layer ids the engine was given; extract again")
    sizes = [rms[name] for name in layers]
    if sizes[0] > 1.5 * sizes[-1] and all(a > b for a, b in pairwise(sizes)):
        text = f"the aux states shrink from layer to layer (RMS {', '.join(f'{x:.3g}' for x in sizes)})"
        yield warning(text, "a residual stream grows: are the layers stored from high to low?")


def names(s: Subject) -> list[str]:
    if isinstance(s.features, Store):
        return [f"aux layer {i}" for i in s.features.meta.aux_layers]
    return [f"aux column {i}" for i in range(s.samples[0].aux_hidden_states.shape[1])]


def ends(s: Subject, name: str) -> bool:
    """Whether that layer is rightly the last state: the boundary behind the last block."""
    return bool(s.target_name) and name == f"aux layer {s.spec.num_layers}"


def aux_of(samples: list[Features]) -> tuple[Tensor, ...]:
    """A of [tokens, H]"""
    return torch.cat([f.aux_hidden_states for f in samples]).float().unbind(1)


CHECKS = [
    Check("store", "features", (), folder_is_whole_and_fits, "features"),
    Check("heldout", "features", ("store",), heldout_is_there),
    Check("contract", "features", ("store",), samples_keep_the_contract, "features"),
    Check("border", "features", ("contract",), ids_and_masks_are_prepares),
    Check("mask_ends", "features", ("contract",), masks_end_with_the_turn, "features"),
    Check("states", "features", ("contract",), states_vary_by_token_and_layer, "features"),
]
