"""What acceptance means here: every figure with its definition and its denominator.

A round drafts a chain of n tokens and has the target verify them in one forward pass. It emits the drafted tokens
that were right (`accepted`), and one token of the target's own, the bonus token. The first token of an answer is
of the prompt's own pass and belongs to no round. Where an accepted token ends the answer, the round is *cut*: it
has no bonus token, and the positions after the cut were never tried.
"""

from typing import Any

import numpy as np

DEFINITIONS = {
    "tau": "tokens emitted by rounds / rounds (target passes that verify), a ratio of sums over prompts; the "
    "bonus token of each round is counted, the first token of an answer (from the prompt's pass) is not",
    "accept_rate_by_position": "conditional: rounds that accepted position k / rounds that accepted all before k "
    "and in which the answer was not over by then",
    "unconditional_rate_by_position": "rounds that accepted position k and all before it / all rounds",
    "draft_acceptance_rate": "accepted tokens / drafted tokens; bonus tokens are not counted",
    "tok_s": "new tokens / wall seconds of decoding a prompt, the pass over the prompt included",
    "timed": "prompts decoded one by one both ways (evaluate.timed_prompts); the speeds are theirs",
    "speedup": "speculative_tok_s / baseline_tok_s",
    "identical": "prompts whose speculative output equals plain greedy decoding token by token",
    "ties": "prompts that part where rounding decides: recomputed on the common prefix, the target's logits of "
    "the two tokens differ by less than factor * eps(dtype) * largest logit (factor: 64 float32, 4 half types)",
    "different": "prompts that part anywhere else: an error",
    "training": "counts of the train stage; tokens and supervised tokens are summed over its epochs",
}


def hit_rates(hits: np.ndarray, tried: np.ndarray | bool = True) -> tuple[list[float], list[float | None]]:
    """(unconditional, conditional) hit rates by draft position; hits, tried: [rounds, n] bool.

    Unconditional: share of all rounds that hit position k. Conditional: the same among rounds that hit every
    position before k (and tried k); None where there is no such round.
    """
    before = np.cumprod(np.concatenate([np.ones((len(hits), 1), bool), hits[:, :-1]], axis=1), axis=1) > 0
    conditional = [
        float(h[r].mean()) if r.any() else None for h, r in zip(hits.T, (before & tried).T, strict=True)
    ]
    return [float(h) for h in hits.mean(axis=0)], conditional


def acceptance(answers: list[tuple[int, list[int]]], draft_tokens: int) -> dict[str, Any]:
    """Acceptance over answers, each given as (new tokens, accepted tokens of each round).

    Returns tau, the rates of `DEFINITIONS`, `rounds`, `tokens` (first tokens included) and `not_available`, the
    reason of every null. Raises RuntimeError when the rounds do not add up to the tokens: a fault of the engine.
    """
    accepted: list[int] = []
    cut: list[int] = []  # indices of rounds
    for tokens, rounds in answers:
        missing = 1 + sum(a + 1 for a in rounds) - tokens  # one when the last round was cut
        if any(not 0 <= a <= draft_tokens for a in rounds) or missing not in (0, 1) or missing > sum(rounds[-1:]):
            raise RuntimeError(f"{tokens} tokens do not come from rounds of {draft_tokens} accepting {rounds}")
        accepted += rounds
        cut += [len(accepted) - 1] * missing
    result: dict[str, Any] = {"rounds": len(accepted), "tokens": sum(t for t, _ in answers)}
    if not accepted:
        reason = (
            "no answer has more than one token, so nothing was drafted" if answers else "no prompt was decoded"
        )
        names = ("tau", "accept_rate_by_position", "unconditional_rate_by_position", "draft_acceptance_rate")
        return {**dict.fromkeys(names), **result, "not_available": dict.fromkeys(names, reason)}
    hits = np.arange(draft_tokens) < np.array(accepted)[:, None]  # [rounds, n]
    unconditional, conditional = hit_rates(hits, hits | ~np.isin(np.arange(len(hits)), cut)[:, None])
    untried = [f"accept_rate_by_position[{k}]" for k, rate in enumerate(conditional) if rate is None]
    return {
        "tau": (sum(accepted) + len(accepted) - len(cut)) / len(accepted),
        "accept_rate_by_position": conditional,
        "unconditional_rate_by_position": unconditional,
        "draft_acceptance_rate": sum(accepted) / (len(accepted) * draft_tokens),
        **result,
        "not_available": dict.fromkeys(untried, "no round got so far"),
    }
