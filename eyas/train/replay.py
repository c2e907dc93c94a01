"""The acceptance a server would see, from held-out features alone: no target, no decoding.

For a greedy answer of the target the stored tokens are what the target would produce, and until its first miss a
chain drafted at row t is fed exactly the stored tokens. So one teacher-forced TTT pass holds every chain: the one
of row t is accepted as far as its leading arg-max predictions equal the stored tokens. For sampled answers it is
an estimate.

Rows are shifted: row r holds token x[r+1] and its chain of K drafted tokens predicts x[r+2], x[r+3], ...
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class Replay:
    """Sums over answers; add two to get those of both."""

    rounds: int  # verified rounds
    tokens: int  # produced by them: not an answer's first (it comes with the prompt), nor any after its end
    reached: np.ndarray  # [K] rounds that asked for draft position k: all before it right, the answer not over
    accepted: np.ndarray  # [K] rounds in which position k was accepted
    # Teacher-forced counts over all rows, [K]:
    eligible: np.ndarray  # rows whose answer has a token at position k
    hits: np.ndarray  # those where the arg-max is that token
    prefix_hits: np.ndarray  # those where it is at all of 0..k
    prefix_eligible: np.ndarray  # those where it is at all of 0..k-1

    def __add__(self, other: "Replay") -> "Replay":
        return Replay(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @classmethod
    def none(cls, steps: int) -> "Replay":
        return cls(0, 0, *(np.zeros(steps, np.int64) for _ in range(6)))

    def numbers(self) -> np.ndarray:
        """[2 + 6 * K] int64, for `from_numbers`: sums that can be added up elsewhere."""
        return np.concatenate([np.atleast_1d(x) for x in vars(self).values()])

    @classmethod
    def from_numbers(cls, numbers: np.ndarray) -> "Replay":
        return cls(int(numbers[0]), int(numbers[1]), *numbers[2:].reshape(6, -1))

    def summary(self) -> dict[str, object]:
        """Ratios of sums; None where the denominator is 0.

        `tau`: tokens / rounds. `accept_rate_by_position[k]`: α_k = P(position k accepted | all before it were).
        `accuracy_by_position`: teacher-forced, unconditional; `conditional_accuracy_by_position`: given that the
        positions before were right.
        """
        return {
            "tau": self.tokens / self.rounds if self.rounds else None,
            "draft_tokens": len(self.reached),
            "accept_rate_by_position": _ratio(self.accepted, self.reached),
            "accuracy_by_position": _ratio(self.hits, self.eligible),
            "conditional_accuracy_by_position": _ratio(self.prefix_hits, self.prefix_eligible),
            "rounds": self.rounds,
            "tokens": self.tokens,
        }


def _ratio(part: np.ndarray, whole: np.ndarray) -> list[float | None]:
    return [float(a / b) if b else None for a, b in zip(part, whole, strict=True)]


def replay(predicted: np.ndarray, tokens: np.ndarray, supervised: np.ndarray, doc_end: np.ndarray) -> Replay:
    """Walk every answer of a packed batch: start at the last prompt row, advance by matches + 1.

    predicted [K, N]: target ids drafted at step k of row r (anything where the row was not computed); tokens [N]:
    x[r+1]; supervised [N] bool: whether it is; doc_end [N]: one past the last row of row r's document.
    """
    steps, n = predicted.shape
    rows = np.arange(n)
    ahead = np.minimum(rows + 1 + np.arange(steps)[:, None], n - 1)  # [K, N] the row that holds chain position k
    # That token must belong to the answer that row r stands in: all rows up to it are supervised.
    inside = supervised[ahead] & (rows + 1 + np.arange(steps)[:, None] < doc_end)
    exists = np.logical_and.accumulate(np.concatenate([supervised[None], inside]))[1:]
    right = exists & (predicted == tokens[ahead])
    prefix = np.logical_and.accumulate(right)
    before = np.concatenate([np.ones((1, n), bool), prefix[:-1]]) & exists
    matches = prefix.sum(0)  # [N]

    # [N - 1] row r + 1 is of row r's answer. An answer begins at the row of its last prompt token.
    goes_on = supervised[:-1] & supervised[1:] & (doc_end[:-1] == doc_end[1:])
    at = first = rows[supervised & ~np.concatenate([[False], goes_on])]
    end = last = rows[supervised & ~np.concatenate([goes_on, [False]])]
    rounds, reached, accepted = 0, np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    while (running := at < end).any():  # one round of every answer that is not over
        at, end = at[running], end[running]
        rounds += len(at)
        reached += before[:, at].sum(1)
        accepted += prefix[:, at].sum(1)
        at = at + matches[at] + 1
    counts = (x.sum(1) for x in (exists, right, prefix, before))
    return Replay(rounds, int((last - first).sum()), reached, accepted, *counts)
