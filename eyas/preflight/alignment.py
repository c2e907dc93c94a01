"""Alignment: does lm_head(final_norm(last[p])) predict token p+1, and are the aux states of the same tokens?

Each way this goes wrong has a signature of its own, so a failure is named: the norm shows in the states' lengths,
whatever the text says; for the rest, what could be right is tried, and how well each guess predicts is evidence.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.features.contract import POST_NORM, PRE_NORM
from eyas.features.store import Store
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.preflight.hypotheses import AUX, MARGIN, WIDE, best_guess, predict, survivors, table, told

ROWS = 512  # supervised rows looked at: a share then has a standard error of at most 2.2 points


def gather(s: Subject) -> tuple[Tensor, Tensor, Tensor]:
    """At some ROWS positions p whose next token is in the same answer: token ids [R, 3] at p to p+2, last [R, H],
    highest aux state [R, 3, H] at p-1 to p+1."""
    tokens, last, aux = [], [], []
    for f in s.samples:
        p = (f.loss_mask[1:-2] & f.loss_mask[2:-1]).nonzero().flatten() + 1
        tokens.append(torch.stack([f.token_ids[p + d] for d in (0, 1, 2)], 1).long())
        last.append(f.last_hidden_state[f.loss_mask.cumsum(0)[p] - 1])
        aux.append(torch.stack([f.aux_hidden_states[p + d, -1] for d in (-1, 0, 1)], 1))
    step = max(1, sum(map(len, tokens)) // ROWS)
    return torch.cat(tokens)[::step], torch.cat(last)[::step].float(), torch.cat(aux)[::step].float()


def unit_rows(s: Subject, last: Tensor) -> tuple[float, Tensor]:
    """After an RMSNorm of weight w, x / w has an RMS of exactly 1 in every row; before it, in none. The share of
    such rows, and their RMS."""
    norm = s.weights.final_norm()
    weight = norm.weight.float() + (norm.flavour == "gemma")
    used = weight.abs() > 1e-3 * weight.abs().max()
    rms = (last[:, used] / weight[used]).square().mean(1).sqrt()  # [R]
    return float(((rms - 1).abs() < 0.05).float().mean()), rms  # bf16 rounds, hence the band


def state_of(s: Subject, last: Tensor) -> str:
    """PRE_NORM or POST_NORM: as a store declares; for other files, as their rows' lengths say."""
    if isinstance(s.features, Store):
        return s.features.meta.last_hidden_state
    return POST_NORM if unit_rows(s, last)[0] > 0.9 else PRE_NORM


def norm_is_as_declared(s: Subject) -> Iterator[Finding]:
    last = gather(s)[1]
    if len(last) < 2:
        yield error("the sampled answers are too short to judge alignment", "raise preflight.samples")
        return
    (normed, rms), declared = unit_rows(s, last), state_of(s, last)
    evidence = {"unit_rows": normed, "rms_min": float(rms.min()), "rms_max": float(rms.max())}
    hint = "extract again; if another tool wrote these states, let store.json say what they really are"
    if not isinstance(s.features, Store):
        yield info(f"the last hidden state is {declared}, by the lengths of its rows", evidence=evidence)
    elif declared == PRE_NORM and normed > 0.9:
        yield error("the last hidden state looks already normed, but is declared pre_final_norm", hint, evidence)
    elif declared != PRE_NORM and normed < 0.5:
        yield error(f"the last hidden state was never normed, but is declared {declared}", hint, evidence)
    else:
        yield info(f"the last hidden state is {declared}, as declared", evidence=evidence)


def last_state_predicts_the_next_token(s: Subject) -> Iterator[Finding]:
    if isinstance(s.features, Store):
        found, expected = s.weights.fingerprint(), s.features.meta.head_fingerprint
        if found != expected:
            text = "the features were made with another lm_head or final norm than the target has now"
            yield error(text, "extract again with this target", {"found": found, "expected": expected})
    tokens, last, aux = gather(s)
    normed = state_of(s, last) == POST_NORM
    states = last if normed else s.weights.final_norm().float()(last)
    scores = predict(states, s.weights.lm_head())  # [R, V]
    before, right, after = (float((scores.argmax(1) == t).float().mean()) for t in tokens.T)
    chosen = scores.gather(1, tokens[:, 1:2])  # [R, 1]
    rank = 1 + (scores > chosen).sum(1).float()
    nll = float((scores.logsumexp(1, keepdim=True) - chosen).mean())
    common = float(tokens[:, 1].bincount().max() / len(tokens))  # what always guessing one token would reach
    guesses = {"as stored": right, "row p is token p-1's": before, "row p is token p+1's": after}
    poor = right <= common and rank.median() > 10
    if right < 0.5 and max(before, after) <= right + MARGIN:
        guesses |= table(s, tokens[:, 1], last, aux[:, 1], normed)
    evidence = {"rows": len(tokens), "top1": right, "top1_at_p": before, "top1_at_p_plus_2": after}
    evidence |= {"mean_rank": float(rank.mean()), "nll": nll, "commonest_token": common}
    evidence["hypotheses"] = {name: round(share, 4) for name, share in guesses.items()}
    measured = f"top-1 {right:.0%}, {nll:.2f} nats, mean rank {rank.mean():.1f}"
    better = best_guess(guesses)
    greedy = s.given_config and s.config.regenerate.mode == "all" and not s.config.regenerate.temperature
    if better.startswith("row p is"):
        text = f"the last hidden state is shifted by one: row p holds token {better.split()[-1]}"
        yield error(
            f"{text} ({told(guesses)})", "row p must be token p's own state, which predicts token p+1", evidence
        )
    elif better:
        text = f"the last hidden state predicts the stored answers only as: {better} ({told(guesses)})"
        yield error(text, "extract again with that put right, or mend the files by it", evidence)
    elif poor:
        text = f"the target's lm_head does not predict the stored answers ({measured}; {told(guesses)})"
        yield error(text, likely_cause(s, evidence), evidence)
    elif guesses.get(AUX, 0.0) > right + WIDE:
        text = "the highest aux layer predicts the stored answers better than the last hidden state"
        yield error(
            f"{text} ({told(guesses)})",
            "the last state must be that of the last layer: are they swapped?",
            evidence,
        )
    elif greedy and right < 0.9:
        hint = "a target's own greedy answers should agree almost everywhere"
        yield warning(f"the target partly disagrees with its own answers ({measured})", hint, evidence)
    else:
        hint = "" if right > 0.7 or greedy else "answers by the target itself (regenerate.mode) raise acceptance"
        yield info(f"the last hidden state predicts the next token: {measured}", hint, evidence)


def likely_cause(s: Subject, evidence: dict) -> str:
    """What is left when no guess predicts well, by whether the target gives these states for these ids."""
    if s.recomputed is False:
        return "the states are not this target's (see features): another revision, head or layer"
    if (by_aux := evidence["hypotheses"].get(AUX, 0.0)) > evidence["top1"] + WIDE:
        return f"the aux states fit tokens and head ({by_aux:.0%}): the last states alone are of something else"
    try:
        evidence["ids_that_come_back"] = share = survivors(s)
    except EyasError:
        share = 1.0
    ids = f"only {share:.0%} of the ids come back when decoded and encoded: another tokenizer made them"
    if s.recomputed:
        plain = "its own states, but text unlike what it says: another tokenizer's ids?"
        return ids if share < 0.8 else plain
    return f"lm_head of another model or revision, states of another layer{', or: ' + ids if share < 0.8 else ''}"


def aux_states_are_of_the_same_tokens(s: Subject) -> Iterator[Finding]:
    """At a late layer, the residual stream of token p resembles p's last state more than its neighbours' do."""
    _, last, aux = gather(s)
    layer = s.features.meta.aux_layers[-1] if isinstance(s.features, Store) else "stored last"
    before, here, after = (float((_standard(aux[:, d]) * _standard(last)).mean()) for d in range(3))
    evidence = {"correlation": here, "at_p_minus_1": before, "at_p_plus_1": after}
    if max(before, after) > here + MARGIN:
        text = f"aux layer {layer} is shifted by one against the last hidden state"
        yield error(text, "row p of every tensor must be token p's", evidence)
    else:
        clear = "" if here > max(before, after) + MARGIN else ", though no token stands out"
        text = f"aux layer {layer} is of the same tokens as the last state (correlation {here:.2f}{clear})"
        yield info(text, evidence=evidence)


def _standard(states: Tensor) -> Tensor:
    """Each channel at mean 0 and deviation 1 over the rows, so that massive channels count as one each."""
    return (states - states.mean(0)) / states.std(0).clamp(min=1e-6)


CHECKS = [
    Check("norm", "alignment", ("contract",), norm_is_as_declared, "features"),
    Check("next_token", "alignment", ("norm",), last_state_predicts_the_next_token, "features"),
    Check("same_tokens", "alignment", ("norm",), aux_states_are_of_the_same_tokens, "features"),
]
