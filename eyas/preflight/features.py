"""Features: is the store whole, this target's, and do its states look like states?"""

from collections.abc import Iterator
from itertools import combinations

import torch

from eyas.features.store import Store
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning

MASSIVE = 1000.0  # a channel with a value this many times the median magnitude
SAME = 0.99  # share of equal values that makes two layers one


def store_is_this_targets(s: Subject) -> Iterator[Finding]:
    store, spec = s.store, s.spec
    store.check(target_fingerprint=spec.fingerprint, hidden_size=spec.hidden_size, aux_layers=s.aux_layers)
    tokens, supervised = int(store.lengths.sum()), int(store.supervised_counts.sum())
    if not supervised:
        yield error(f"{store.folder} holds no supervised token", "see prepare's counts and examples")
        return
    share = supervised / tokens
    yield info(f"{len(store):,} samples, {tokens:,} tokens of {store.meta.target}, {share:.0%} supervised")
    if share >= 0.95:
        yield warning("prompts seem to be supervised too", "look at prepare's examples", {"share": share})
    if empty := int((store.supervised_counts == 0).sum()):
        yield warning(f"{empty} samples have no supervised token and teach nothing")


def heldout_is_there(s: Subject) -> Iterator[Finding]:
    heldout = Store(s.folder("extract") / "features" / "heldout")
    if not heldout.supervised_counts.sum():
        yield warning("nothing is held out: the best step cannot be told", "set data.heldout above 0")
        return
    heldout.check(target_fingerprint=s.spec.fingerprint, aux_layers=s.aux_layers)
    if shared := set(heldout.ids) & set(s.store.ids):
        yield error(f"{len(shared)} samples are in both training and held out, such as {min(shared)}")


def samples_keep_the_contract(s: Subject) -> Iterator[Finding]:
    for f in s.samples:  # reading checks tensors, shapes, dtypes, NaN, infinity, zero rows
        for at in ((f.token_ids < 0) | (f.token_ids >= s.spec.vocab_size)).nonzero()[:1].flatten().tolist():
            text = f"token {at} is {int(f.token_ids[at])}, the target knows ids below {s.spec.vocab_size}"
            yield error(f"sample {f.id}: {text}", "the data was tokenised for another target")
    tokens = sum(len(f.token_ids) for f in s.samples)
    yield info(f"{len(s.samples)} samples, {tokens:,} tokens: four tensors each, all rows finite and none zero")


def states_vary_by_token_and_layer(s: Subject) -> Iterator[Finding]:
    aux = torch.cat([f.aux_hidden_states for f in s.samples]).float().unbind(1)  # A of [tokens, H]
    layers = {f"aux layer {i}": states for i, states in zip(s.store.meta.aux_layers, aux, strict=True)}
    last = torch.cat([f.last_hidden_state for f in s.samples]).float()
    for name, states in (layers | {"last hidden state": last}).items():
        peak, rms = states.abs().amax(0), float(states.square().mean().sqrt())  # [H]
        massive = (peak > MASSIVE * states.abs().median()).nonzero().flatten().tolist()
        text = f"{name}: RMS {rms:.3g}, largest {peak.max():,.0f}, {len(massive)} massive channels"
        yield info(text, evidence={"rms": rms, "max": float(peak.max()), "massive": massive[:8]})
        if len(states) > 1 and bool((states == states[0]).all()):
            yield error(f"{name}: the same state at every token", "the engine gave one row for all")
    for (one, a), (two, b) in combinations(layers.items(), 2):
        # Counted by value, so that a few huge channels do not decide.
        share = float(torch.isclose(a, b, rtol=0.01, atol=0.0).float().mean())
        if share > SAME:
            text = f"{one} and {two} hold the same states ({share:.1%} of the values agree)"
            yield error(text, "check the layer ids the engine was given; extract again")


CHECKS = [
    Check("store", "features", (), store_is_this_targets),
    Check("heldout", "features", ("store",), heldout_is_there),
    Check("contract", "features", ("store",), samples_keep_the_contract),
    Check("states", "features", ("contract",), states_vary_by_token_and_layer),
]
