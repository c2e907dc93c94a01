"""Features: is the store whole, this target's, and do its states look like states?"""

from collections.abc import Iterator

import torch

from eyas.features.store import Store
from eyas.preflight.finding import Check, Finding, Subject

MASSIVE = 1000.0  # a channel with a value this many times the median magnitude
SAME = 0.99  # share of equal values that makes two layers one


def store_is_this_targets(s: Subject) -> Iterator[Finding]:
    store, spec = s.store, s.spec
    store.check(target_fingerprint=spec.fingerprint, hidden_size=spec.hidden_size, aux_layers=s.aux_layers)
    lengths, counts = store.lengths, store.supervised_counts
    if not counts.sum():
        yield Finding("error", f"{store.folder} holds no supervised token", "see prepare's counts and examples")
        return
    share = float(counts.sum() / lengths.sum())
    evidence = {"samples": len(store), "tokens": int(lengths.sum()), "share": share}
    text = f"{len(store):,} samples, {lengths.sum():,} tokens of {store.meta.target}, {share:.0%} supervised"
    yield Finding("info", text, evidence=evidence)
    if share >= 0.95:
        yield Finding("warning", "prompts seem to be supervised too", "look at prepare's examples", evidence)
    if empty := int((counts == 0).sum()):
        yield Finding("warning", f"{empty} samples have no supervised token and teach nothing")
    for skipped in store.skipped[:1]:
        reason = f"the first: {skipped['id']} ({skipped['reason']})"
        yield Finding("warning", f"extraction left out {len(store.skipped)} samples, {reason}")


def heldout_is_there(s: Subject) -> Iterator[Finding]:
    heldout = Store(s.folder("extract") / "features" / "heldout")
    if not heldout.supervised_counts.sum():
        yield Finding("warning", "nothing is held out: the best step cannot be told", "set data.heldout above 0")
        return
    heldout.check(target_fingerprint=s.spec.fingerprint, aux_layers=s.aux_layers)
    if shared := set(heldout.ids) & set(s.store.ids):
        yield Finding("error", f"{len(shared)} samples are in both training and held out, such as {min(shared)}")


def samples_keep_the_contract(s: Subject) -> Iterator[Finding]:
    for features in s.samples:  # reading checks tensors, shapes, dtypes, NaN, infinity, zero rows
        ids, size = features.token_ids, s.spec.vocab_size
        for at in ((ids < 0) | (ids >= size)).nonzero()[:1].flatten().tolist():
            text = f"sample {features.id}: token {at} is {int(ids[at])}, the target knows ids below {size}"
            yield Finding("error", text, "the data was tokenised for another target")
    tokens = sum(len(f.token_ids) for f in s.samples)
    text = f"{len(s.samples)} samples, {tokens:,} tokens: four tensors each, all rows finite and none zero"
    yield Finding("info", text)


def states_vary_by_token_and_layer(s: Subject) -> Iterator[Finding]:
    aux = torch.cat([f.aux_hidden_states for f in s.samples]).float().unbind(1)  # A of [tokens, H]
    layers = {f"aux layer {i}": states for i, states in zip(s.store.meta.aux_layers, aux, strict=True)}
    layers["last hidden state"] = torch.cat([f.last_hidden_state for f in s.samples]).float()
    for name, states in layers.items():
        peak = states.abs().amax(0)  # [H]
        massive = (peak > MASSIVE * states.abs().median()).nonzero().flatten().tolist()
        evidence = {"rms": float(states.square().mean().sqrt()), "max": float(peak.max()), "massive": massive[:8]}
        text = (
            f"{name}: RMS {evidence['rms']:.3g}, largest {evidence['max']:,.0f}, {len(massive)} massive channels"
        )
        yield Finding("info", text, evidence=evidence)
        if len(states) > 1 and bool((states == states[0]).all()):
            yield Finding("error", f"{name}: the same state at every token", "the engine gave one row for all")
    for i, a in enumerate(aux):
        for j in range(i + 1, len(aux)):
            # Counted by value, so that a few huge channels do not decide.
            share = float(torch.isclose(a, aux[j], rtol=0.01, atol=0.0).float().mean())
            if share > SAME:
                first, second = list(layers)[i], list(layers)[j]
                text = f"{first} and {second} hold the same states ({share:.1%} of the values agree)"
                yield Finding("error", text, "check the layer ids the engine was given; extract again")


CHECKS = [
    Check("store", "features", (), store_is_this_targets),
    Check("heldout", "features", ("store",), heldout_is_there),
    Check("contract", "features", ("store",), samples_keep_the_contract),
    Check("states", "features", ("contract",), states_vary_by_token_and_layer),
]
