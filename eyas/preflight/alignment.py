"""Alignment: does lm_head(final_norm(last[p])) predict token p+1, and are the aux states of the same tokens?

Each way this goes wrong has a signature of its own, so a failure is named: the norm shows in the states' lengths,
whatever the text says; a shift shows as a better prediction of the token before or after.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.features.contract import PRE_NORM, Features
from eyas.preflight.finding import Check, Finding, Subject

ROWS = 512  # supervised rows looked at: a share then has a standard error of at most 2.2 points
MARGIN = 0.07  # three of those


def inner_rows(f: Features) -> tuple[Tensor, Tensor]:
    """(positions p [R] whose next token is in the same answer, their indices [R] among the supervised rows)."""
    at = f.loss_mask.nonzero().flatten()  # [M]
    inside = (at > 0) & (at + 2 < len(f.token_ids)) & f.loss_mask[(at + 1).clamp(max=len(f.token_ids) - 1)]
    return at[inside], inside.nonzero().flatten()


def gather(s: Subject) -> tuple[Tensor, Tensor, Tensor]:
    """Of some ROWS positions p: token ids [R, 3] at p to p+2, last [R, H] at p, aux [R, 3, A, H] at p-1 to p+1."""
    tokens, last, aux = [], [], []
    for f in s.samples:
        p, rows = inner_rows(f)
        tokens.append(torch.stack([f.token_ids[p + d] for d in (0, 1, 2)], 1).long())
        last.append(f.last_hidden_state[rows])
        aux.append(torch.stack([f.aux_hidden_states[p + d] for d in (-1, 0, 1)], 1))
    step = max(1, sum(map(len, tokens)) // ROWS)
    return torch.cat(tokens)[::step], torch.cat(last)[::step].float(), torch.cat(aux)[::step].float()


def logits(states: Tensor, head: Tensor) -> Tensor:
    """[R, V] of normed `states` [R, H]; in blocks, so that `head` [V, H] is never copied whole."""
    return torch.cat([states @ block.float().T for block in head.split(1 << 14)], 1)


def norm_is_as_declared(s: Subject) -> Iterator[Finding]:
    """After an RMSNorm of weight w, x / w has an RMS of exactly 1 in every row; before it, in none."""
    declared, norm, last = s.store.meta.last_hidden_state, s.weights.final_norm(), gather(s)[1]
    if len(last) < 2:
        yield Finding("error", "the sampled answers are too short to judge alignment", "raise preflight.samples")
        return
    weight = norm.weight.float() + (norm.flavour == "gemma")
    used = weight.abs() > 1e-3 * weight.abs().max()
    rms = (last[:, used] / weight[used]).square().mean(1).sqrt()  # [R]
    normed = float(((rms - 1).abs() < 0.05).float().mean())  # bf16 rounds, hence the band
    evidence = {"unit_rows": normed, "rms_min": float(rms.min()), "rms_max": float(rms.max())}
    hint = "extract again; if another tool wrote these states, let store.json say what they really are"
    if declared == PRE_NORM and normed > 0.9:
        text = "the last hidden state looks already normed, but is declared pre_final_norm"
        yield Finding("error", text, hint, evidence)
    elif declared != PRE_NORM and normed < 0.5:
        yield Finding(
            "error", f"the last hidden state was never normed, but is declared {declared}", hint, evidence
        )
    else:
        yield Finding("info", f"the last hidden state is {declared}, as declared", evidence=evidence)


def last_state_predicts_the_next_token(s: Subject) -> Iterator[Finding]:
    found, expected = s.weights.fingerprint(), s.store.meta.head_fingerprint
    if found != expected:
        text = "the features were made with another lm_head or final norm than the target has now"
        yield Finding("error", text, "extract again with this target", {"found": found, "expected": expected})
    tokens, last, _ = gather(s)
    states = s.weights.final_norm().float()(last) if s.store.meta.last_hidden_state == PRE_NORM else last
    scores = logits(states, s.weights.lm_head())
    before, right, after = (float((scores.argmax(1) == t).float().mean()) for t in tokens.T)
    chosen = scores.gather(1, tokens[:, 1:2])  # [R, 1]
    rank = 1 + (scores > chosen).sum(1).float()
    nll = float((scores.logsumexp(1, keepdim=True) - chosen).mean())
    common = float(tokens[:, 1].bincount().max() / len(tokens))  # what always guessing one token would reach
    evidence = {"rows": len(tokens), "top1": right, "top1_at_p": before, "top1_at_p_plus_2": after}
    evidence |= {"mean_rank": float(rank.mean()), "nll": nll, "commonest_token": common}
    measured = f"top-1 {right:.0%}, {nll:.2f} nats, mean rank {rank.mean():.1f}"
    greedy = s.config.regenerate.mode == "all" and not s.config.regenerate.temperature
    if max(before, after) > right + MARGIN:
        text = f"the last hidden state is shifted by one: row p holds token {'p-1' if before > after else 'p+1'}'s"
        yield Finding("error", text, "row p must be token p's own state, which predicts token p+1", evidence)
    elif right <= common and rank.median() > 10:
        text = f"the target's lm_head does not predict the stored answers ({measured})"
        hint = "lm_head of another model, states of another layer, or a target that does not know such text"
        yield Finding("error", text, hint, evidence)
    elif greedy and right < 0.9:
        hint = "a target's own greedy answers should agree almost everywhere"
        yield Finding("warning", f"the target partly disagrees with its own answers ({measured})", hint, evidence)
    else:
        hint = "" if right > 0.7 or greedy else "answers by the target itself (regenerate.mode) raise acceptance"
        yield Finding("info", f"the last hidden state predicts the next token: {measured}", hint, evidence)


def aux_states_are_of_the_same_tokens(s: Subject) -> Iterator[Finding]:
    """At a late layer, the residual stream of token p resembles p's last state more than its neighbours' do; and
    later layers predict the next token better through the target's own norm and head (logit lens)."""
    tokens, last, aux = gather(s)
    layers = s.store.meta.aux_layers
    before, here, after = (float((_standard(aux[:, d, -1]) * _standard(last)).mean()) for d in range(3))
    evidence: dict = {"correlation": here, "at_p_minus_1": before, "at_p_plus_1": after}
    if max(before, after) > here + MARGIN:
        text = f"aux layer {layers[-1]} is shifted by one against the last hidden state"
        yield Finding("error", text, "row p of every tensor must be token p's", evidence)
    else:
        clear = "" if here > max(before, after) + MARGIN else ", though no token stands out"
        text = f"aux layer {layers[-1]} is of the same tokens as the last state (correlation {here:.2f}{clear})"
        yield Finding("info", text, evidence=evidence)
    norm, head, few = s.weights.final_norm().float(), s.weights.lm_head(), slice(0, ROWS // 4)
    nll = {}
    for i, layer in enumerate(layers):
        scores = logits(norm(aux[few, 1, i]), head)
        nll[layer] = float((scores.logsumexp(1) - scores.gather(1, tokens[few, 1:2])[:, 0]).mean())
    text = "logit lens, nats by aux layer: " + ", ".join(f"{layer}: {x:.1f}" for layer, x in nll.items())
    hint = "" if min(nll.values()) == nll[layers[-1]] else "weak evidence, but the highest layer should be best"
    yield Finding("info", text, hint, {"nll": nll})


def _standard(states: Tensor) -> Tensor:
    """Each channel at mean 0 and deviation 1 over the rows, so that massive channels count as one each."""
    return (states - states.mean(0)) / states.std(0).clamp(min=1e-6)


CHECKS = [
    Check("norm", "alignment", ("contract",), norm_is_as_declared),
    Check("next_token", "alignment", ("norm",), last_state_predicts_the_next_token),
    Check("same_tokens", "alignment", ("norm",), aux_states_are_of_the_same_tokens),
]
