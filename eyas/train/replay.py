"""The acceptance a server would see, from held-out features alone: no target, no decoding.

For a greedy answer of the target the stored tokens are what the target would produce, and until its first miss a
chain drafted at row t is fed exactly the stored tokens. So one teacher-forced TTT pass holds every chain: the one
of row t is accepted as far as its leading arg-max predictions equal the stored tokens. For sampled answers it is
an estimate.

Rows are shifted: row r holds token x[r+1] and its chain predicts x[r+2], x[r+3], ...
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class Replay:
    """Sums over answers; add two to get those of both. K: drafted tokens of a round at most.

    Attributes:
        rounds: [K] verified rounds when n = 1..K tokens are drafted in each.
        tokens: tokens produced by those rounds, the bonus token of each included; the first token of an answer is
            not (it comes with the prompt), nor is anything after its end.
        reached: [K] rounds (of n = K) in which draft position k was still asked for: all before it were accepted
            and the answer was not over.
        accepted: [K] rounds (of n = K) in which position k was accepted.
        eligible, hits, prefix_hits, prefix_eligible: [K] teacher-forced counts over all rows: rows with a stored
            token at position k; those where the arg-max is that token; those where it is at positions 0..k; and
            those where it was at 0..k-1 (and k exists).
    """

    rounds: np.ndarray
    tokens: int
    reached: np.ndarray
    accepted: np.ndarray
    eligible: np.ndarray
    hits: np.ndarray
    prefix_hits: np.ndarray
    prefix_eligible: np.ndarray

    def __add__(self, other: "Replay") -> "Replay":
        return Replay(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def summary(self) -> dict[str, object]:
        """Ratios of sums; None where the denominator is 0.

        `tau`: tokens / rounds with K drafted tokens, `tau_by_draft_tokens[n-1]` with n.
        `accept_rate_by_position[k]`: α_k = P(position k accepted | all before it were).
        `accept_share_by_position[k]`: the same count over all rounds. `accuracy_by_position`: teacher-forced,
        unconditional; `conditional_accuracy_by_position`: given the positions before were right.
        """
        taus = _ratio(np.full_like(self.rounds, self.tokens), self.rounds)
        return {
            "tau": taus[-1],
            "tau_by_draft_tokens": taus,
            "draft_tokens": len(self.rounds),
            "accept_rate_by_position": _ratio(self.accepted, self.reached),
            "accept_share_by_position": _ratio(self.accepted, np.full_like(self.accepted, self.rounds[-1])),
            "accuracy_by_position": _ratio(self.hits, self.eligible),
            "conditional_accuracy_by_position": _ratio(self.prefix_hits, self.prefix_eligible),
            "rounds": int(self.rounds[-1]),
            "tokens": self.tokens,
        }


def _ratio(part: np.ndarray, whole: np.ndarray) -> list[float | None]:
    return [float(a / b) if b else None for a, b in zip(part, whole, strict=True)]


def replay(predicted: np.ndarray, tokens: np.ndarray, supervised: np.ndarray, doc_end: np.ndarray) -> Replay:
    """Walk every answer of a packed batch: start at the last prompt row, advance by matches + 1.

    Args:
        predicted: [K, N] target ids drafted at step k of row r (anything where the row was not computed).
        tokens: [N] row r's token x[r+1].
        supervised: [N] bool, whether that token is supervised.
        doc_end: [N] one past the last row of row r's document.
    """
    steps, n = predicted.shape
    rows = np.arange(n)
    exists, right = np.zeros((steps, n), bool), np.zeros((steps, n), bool)
    for k in range(steps):
        at = np.minimum(rows + 1 + k, n - 1)
        # the token must belong to the answer that row r stands in: all rows up to it are supervised
        exists[k] = (rows + 1 + k < doc_end) & supervised[at] & (exists[k - 1] if k else supervised)
        right[k] = exists[k] & (predicted[k] == tokens[at])
    prefix = np.logical_and.accumulate(right)
    matches = prefix.sum(0)  # [N]
    before = np.concatenate([np.ones((1, n), bool), prefix[:-1]]) & exists

    starts_document = np.concatenate([[True], doc_end[1:] != doc_end[:-1]]) if n else np.zeros(0, bool)
    previous = np.concatenate([[False], supervised[:-1]]) & ~starts_document
    first = rows[supervised & ~previous]  # the row of each answer's last prompt token
    following = np.concatenate([supervised[1:], [False]]) & np.concatenate([~starts_document[1:], [False]])
    last = rows[supervised & ~following]  # the row whose token ends the answer

    rounds, reached, accepted = (np.zeros(steps, np.int64) for _ in range(3))
    for drafted in range(1, steps + 1):
        at, end = first, last
        while True:  # one round of every answer that is not over
            at, end = at[at < end], end[at < end]
            if not len(at):
                break
            rounds[drafted - 1] += len(at)
            if drafted == steps:
                reached += before[:, at].sum(1)
                accepted += prefix[:, at].sum(1)
            at = at + np.minimum(matches[at], drafted) + 1
    counts = (x.sum(1) for x in (exists, right, prefix, before))
    return Replay(rounds, int((last - first).sum()), reached, accepted, *counts)
