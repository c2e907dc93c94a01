"""Acceptance figures against values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.decode.stats import acceptance, hit_rates


def test_unconditional_and_conditional_rates_are_told_apart():
    unconditional, conditional = hit_rates(np.array([[1, 1], [1, 0], [0, 1], [0, 0]], bool))
    assert unconditional[1] == 0.5 and conditional[1] == 0.5
    unconditional, conditional = hit_rates(np.array([[1, 1], [1, 1], [0, 0], [0, 0]], bool))
    assert unconditional[1] == 0.5 and conditional[1] == 1.0


def test_length_and_acceptance_rate_of_four_rounds():
    result = acceptance([(11, [0, 2, 3, 1])], draft_tokens=3)
    assert result["tau"] == 2.5
    assert result["draft_acceptance_rate"] == 0.5


def test_tau_is_a_ratio_of_sums_not_a_mean_of_means():
    # 9 tokens in 3 rounds and 1 token in 1 round (each answer has one more token, from the prompt's pass)
    result = acceptance([(10, [2, 2, 2]), (2, [0])], draft_tokens=2)
    assert result["tau"] == 10 / 4


def test_position_rates_share_the_number_of_rounds_and_add_up_to_tau():
    accepted = [3] * 42 + [2] * 13 + [1] * 15 + [0] * 17
    result = acceptance([(1 + sum(accepted) + 87, accepted)], draft_tokens=3)
    assert result["rounds"] == 87
    assert result["unconditional_rate_by_position"] == pytest.approx([0.805, 0.632, 0.483], abs=5e-4)
    assert result["tau"] == pytest.approx(2.92, abs=5e-3)


def test_a_round_cut_by_the_end_of_the_answer_has_no_bonus_token_and_no_trials_after_the_cut():
    result = acceptance([(5, [1, 2])], draft_tokens=3)  # 1 + (1 + bonus) + 2
    assert result["tau"] == 4 / 2
    assert result["accept_rate_by_position"] == [1.0, 0.5, None]
    assert result["not_available"] == {"accept_rate_by_position[2]": "no round got so far"}


@pytest.mark.parametrize(("answers", "reason"), [([(1, [])], "one token"), ([], "no prompt")])
def test_without_rounds_every_figure_is_null_with_a_reason(answers, reason):
    result = acceptance(answers, draft_tokens=3)
    assert result["tau"] is None and result["accept_rate_by_position"] is None
    assert reason in result["not_available"]["tau"]


@pytest.mark.parametrize("answer", [(5, [1]), (6, [4]), (9, []), (1, [0]), (2, [1, 0])])
def test_rounds_that_do_not_add_up_to_the_tokens_are_refused(answer):
    with pytest.raises(RuntimeError):
        acceptance([answer], draft_tokens=3)


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=20), st.booleans()), min_size=1, max_size=5))
def test_rates_stay_in_range_and_tau_follows_from_them(answers):
    cuts = [c and sum(a[-1:]) > 0 for a, c in answers]
    result = acceptance(
        [(1 + sum(a) + len(a) - c, a) for (a, _), c in zip(answers, cuts, strict=True)], draft_tokens=4
    )
    if result["tau"] is not None:
        whole = 1 + sum(result["unconditional_rate_by_position"])
        assert result["tau"] == pytest.approx(whole - sum(cuts) / result["rounds"])
        assert all(r is None or 0 <= r <= 1 for r in result["accept_rate_by_position"])
        assert 1 <= result["tau"] <= 5
