"""Alignment: does lm_head(final_norm(last[p])) predict token p+1, and are the aux states of the same tokens?

Each way this goes wrong has a signature of its own, so a failure is named: the norm shows in the states' lengths,
whatever the text says; a shift shows as a better prediction of the token before or after.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.features.contract import PRE_NORM
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning

ROWS = 512  # supervised rows looked at: a share then has a standard error of at most 2.2 points
MARGIN = 0.07  # three of those


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


def norm_is_as_declared(s: Subject) -> Iterator[Finding]:
    """After an RMSNorm of weight w, x / w has an RMS of exactly 1 in every row; before it, in none."""
    declared, norm, last = s.store.meta.last_hidden_state, s.weights.final_norm(), gather(s)[1]
    if len(last) < 2:
        yield error("the sampled answers are too short to judge alignment", "raise preflight.samples")
        return
    weight = norm.weight.float() + (norm.flavour == "gemma")
    used = weight.abs() > 1e-3 * weight.abs().max()
    rms = (last[:, used] / weight[used]).square().mean(1).sqrt()  # [R]
    normed = float(((rms - 1).abs() < 0.05).float().mean())  # bf16 rounds, hence the band
    evidence = {"unit_rows": normed, "rms_min": float(rms.min()), "rms_max": float(rms.max())}
    hint = "extract again; if another tool wrote these states, let store.json say what they really are"
    if declared == PRE_NORM and normed > 0.9:
        yield error("the last hidden state looks already normed, but is declared pre_final_norm", hint, evidence)
    elif declared != PRE_NORM and normed < 0.5:
        yield error(f"the last hidden state was never normed, but is declared {declared}", hint, evidence)
    else:
        yield info(f"the last hidden state is {declared}, as declared", evidence=evidence)


def last_state_predicts_the_next_token(s: Subject) -> Iterator[Finding]:
    found, expected = s.weights.fingerprint(), s.store.meta.head_fingerprint
    if found != expected:
        text = "the features were made with another lm_head or final norm than the target has now"
        yield error(text, "extract again with this target", {"found": found, "expected": expected})
    tokens, states, _ = gather(s)
    if s.store.meta.last_hidden_state == PRE_NORM:
        states = s.weights.final_norm().float()(states)
    parts = s.weights.lm_head().split(1 << 14)  # so that [V, H] is never copied whole
    scores = torch.cat([states @ part.float().T for part in parts], 1)  # [R, V]
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
        yield error(text, "row p must be token p's own state, which predicts token p+1", evidence)
    elif right <= common and rank.median() > 10:
        hint = "lm_head of another model, states of another layer, or a target that does not know such text"
        yield error(f"the target's lm_head does not predict the stored answers ({measured})", hint, evidence)
    elif greedy and right < 0.9:
        hint = "a target's own greedy answers should agree almost everywhere"
        yield warning(f"the target partly disagrees with its own answers ({measured})", hint, evidence)
    else:
        hint = "" if right > 0.7 or greedy else "answers by the target itself (regenerate.mode) raise acceptance"
        yield info(f"the last hidden state predicts the next token: {measured}", hint, evidence)


def aux_states_are_of_the_same_tokens(s: Subject) -> Iterator[Finding]:
    """At a late layer, the residual stream of token p resembles p's last state more than its neighbours' do."""
    _, last, aux = gather(s)
    layer = s.store.meta.aux_layers[-1]
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
    Check("norm", "alignment", ("contract",), norm_is_as_declared),
    Check("next_token", "alignment", ("norm",), last_state_predicts_the_next_token),
    Check("same_tokens", "alignment", ("norm",), aux_states_are_of_the_same_tokens),
]
