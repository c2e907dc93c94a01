import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.train.replay import replay


def pack(samples, steps):
    """Samples (token ids, mask, predict(row, k) -> id) to the arrays of `replay`."""
    tokens, supervised, doc_end, columns = [], [], [], []
    for ids, mask, predict in samples:
        n = len(ids) - 1
        tokens += ids[1:]
        supervised += mask[1:]
        doc_end += [len(doc_end) + n] * n
        columns += [[predict(r, k) for k in range(steps)] for r in range(n)]
    predicted = np.array(columns).reshape(-1, steps).T
    return predicted, np.array(tokens), np.array(supervised, bool), np.array(doc_end)


def slow_walk(ids, mask, predict, drafted):
    """Accepted tokens of every round, and tokens produced, by the plain definition."""
    accepted, produced, t = [], 0, 0
    while t < len(ids):
        if not mask[t]:
            t += 1
            continue
        end = t
        while end + 1 < len(ids) and mask[end + 1]:
            end += 1
        known = max(t, 1)  # newest token that is known before a round
        while known < end:
            m = 0
            while m < drafted and known + 1 + m <= end and predict(known - 1, m) == ids[known + 1 + m]:
                m += 1
            accepted.append(m)
            new = min(m + 1, end - known)
            produced += new
            known += new
        t = end + 1
    return accepted, produced


def test_a_perfect_draft_produces_k_plus_one_tokens_a_round():
    ids = list(range(2, 2 + 3 + 9))  # 3 prompt tokens; answer of 9, the first comes with the prompt
    mask = [False] * 3 + [True] * 9
    got = replay(*pack([(ids, mask, lambda r, k: ids[min(r + 2 + k, 11)])], steps=3)).summary()
    assert (got["tokens"], got["rounds"], got["tau"]) == (8, 2, 4.0)
    assert got["accept_rate_by_position"] == [1.0, 1.0, 1.0]


def test_a_draft_that_is_always_wrong_produces_one_token_a_round():
    ids, mask = [5, 6, 7, 8, 9], [False, True, True, True, True]
    got = replay(*pack([(ids, mask, lambda r, k: 0)], steps=2)).summary()
    assert (got["tokens"], got["rounds"], got["tau"]) == (3, 3, 1.0)
    assert got["accept_rate_by_position"] == [0.0, None]  # position 1 was never reached


def test_hits_after_the_first_miss_do_not_count():
    ids, mask = [1, 2, 3, 4, 5], [False, True, True, True, True]
    got = replay(*pack([(ids, mask, lambda r, k: ids[min(r + 2 + k, 4)] if k else 0)], steps=3)).summary()
    assert got["tau"] == 1.0
    assert got["accuracy_by_position"][:2] == [0.0, 1.0] and got["conditional_accuracy_by_position"] == [
        0.0,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("hits", "unconditional", "conditional"),
    [([[1, 1], [1, 0], [0, 1], [0, 0]], 0.5, 0.5), ([[1, 1], [1, 1], [0, 0], [0, 0]], 0.5, 1.0)],
)
def test_both_accuracies_of_the_second_position(hits, unconditional, conditional):
    samples = []
    for hit in hits:  # one row each that has both positions; later rows have no second position
        ids = [1, 2, 3, 4]
        samples.append(
            (ids, [False, True, True, True], lambda r, k, h=hit, i=ids: i[r + 2 + k] if h[k] and r == 0 else 0)
        )
    got = replay(*pack(samples, steps=2)).summary()
    assert got["accuracy_by_position"][1] == unconditional
    assert got["conditional_accuracy_by_position"][1] == conditional


def test_an_answer_of_one_token_has_no_round_and_no_rate():
    got = replay(*pack([([1, 2, 3], [False, False, True], lambda r, k: 3)], steps=2)).summary()
    assert got["tau"] is None and got["rounds"] == 0 and got["accept_rate_by_position"] == [None, None]


def test_nothing_is_drafted_across_documents():
    one = ([1, 2, 3], [True] * 3, lambda r, k: 3)
    got = replay(*pack([one, one], steps=4)).summary()
    assert got["tokens"] == 2 and got["rounds"] == 2


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_walk_equals_the_plain_definition(data):
    steps = data.draw(st.integers(1, 4))
    samples, accepted, produced = [], [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(2, 12))
        ids = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        table = data.draw(st.lists(st.integers(0, 2), min_size=size * steps, max_size=size * steps))
        predict = lambda r, k, t=table: t[r * steps + k]  # noqa: E731
        samples.append((ids, mask, predict))
        rounds, tokens = slow_walk(ids, mask, predict, steps)
        accepted += rounds
        produced += tokens
    got = replay(*pack(samples, steps))
    assert got.tokens == produced
    assert got.rounds == len(accepted)
    assert got.accepted.tolist() == [sum(m > k for m in accepted) for k in range(steps)]
    tau = got.summary()["tau"]
    assert tau is None or 1 <= tau <= steps + 1
