"""A sample's tensors: what is refused, and with which words."""

from dataclasses import replace

import pytest
import torch

from eyas.errors import EyasError
from eyas.features.contract import BadFeatures


def spoiled(features, name: str, place: tuple, value: float):
    tensor = getattr(features, name).clone()
    tensor[place] = value
    return replace(features, **{name: tensor})


def test_good_features_pass_and_are_given_back(make_features, meta):
    features = make_features(tokens=7)
    assert features.validate(meta) is features


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "is NaN"), (float("inf"), "is infinite"), (-float("inf"), "is infinite")]
)
def test_nan_and_infinity_name_sample_tensor_layer_and_token(make_features, meta, value, words):
    bad = spoiled(make_features("sample-9", 6), "aux_hidden_states", (3, 1, 4), value)
    with pytest.raises(BadFeatures, match=rf"sample sample-9: aux_hidden_states of layer 3 at token 3 {words}"):
        bad.validate(meta)


def test_all_zero_state_is_named(make_features, meta):
    bad = spoiled(make_features(tokens=200), "aux_hidden_states", (150, 2), 0.0)
    with pytest.raises(BadFeatures, match="layer 5 at token 150 is all zeros"):
        bad.validate(meta)


def test_negative_zeros_are_zeros_too_and_a_single_value_is_not(make_features, meta):
    features = spoiled(make_features(), "aux_hidden_states", (1, 1), 0.0)
    with pytest.raises(BadFeatures, match="all zeros"):
        spoiled(features, "aux_hidden_states", (1, 1), -0.0).validate(meta)
    spoiled(features, "aux_hidden_states", (1, 1, 0), 1e-30).validate(meta)


def test_bad_last_state_is_named_by_its_token_not_by_its_row(make_features, meta):
    features = make_features("odd", 9)
    token = int(features.loss_mask.nonzero()[2])
    bad = spoiled(features, "last_hidden_state", (2, 0), float("nan"))
    with pytest.raises(BadFeatures, match=f"last_hidden_state at token {token} is NaN"):
        bad.validate(meta)


def test_axes_in_another_order_are_refused(make_features, meta):
    features = make_features(tokens=4)
    turned = replace(features, aux_hidden_states=features.aux_hidden_states.transpose(0, 1))
    with pytest.raises(BadFeatures, match=r"\[3, 4, 8\].*expected \(\[4, 3, 8\].*axes token, aux_layer, hidden"):
        turned.validate(meta)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": torch.arange(5)},  # int64
        {"loss_mask": torch.ones(5, dtype=torch.int32)},
        {"last_hidden_state": torch.ones(5, 8, dtype=torch.bfloat16)},  # dense rows
        {"aux_hidden_states": torch.ones(5, 3, 8)},  # float32
    ],
    ids=lambda c: next(iter(c)),
)
def test_wrong_dtype_or_row_count_names_the_field(make_features, meta, change):
    with pytest.raises(BadFeatures, match=f"sample s0: {next(iter(change))} is"):
        replace(make_features("s0", 5), **change).validate(meta)


def test_a_value_beyond_bf16_is_an_error_not_an_infinity(meta, make_features):
    base = make_features(tokens=2)
    aux = torch.ones(2, 3, 8)
    aux[1, 0, 0] = 3.4e38  # finite in float32
    made = base.from_states("big", base.token_ids, base.loss_mask, aux, torch.ones(2, 8))
    with pytest.raises(BadFeatures, match=r"sample big: .* layer 2 at token 1 is infinite in bfloat16"):
        made.validate(meta)


def test_states_are_rounded_to_nearest_and_only_supervised_last_rows_kept(make_features):
    base, mask = make_features(tokens=3), torch.tensor([0, 1, 1])
    aux, last = torch.full((3, 3, 8), 1.0 + 2**-8 + 2**-12), torch.arange(24.0).view(3, 8)
    made = base.from_states("r", torch.arange(3), mask, aux, last)
    assert (made.aux_hidden_states == 1.0 + 2**-7).all()  # truncation would give 1.0
    assert made.last_hidden_state.float().tolist() == last[1:].tolist()


def test_rows_that_do_not_match_tokens_are_refused(make_features):
    base = make_features(tokens=3)
    with pytest.raises(BadFeatures, match=r"3 tokens, but rows: .*'aux_hidden_states': 4"):
        base.from_states("r", torch.arange(3), torch.ones(3), torch.ones(4, 3, 8), torch.ones(3, 8))


def test_made_features_do_not_hold_on_to_a_larger_tensor(make_features):
    whole = torch.ones(100, 3, 8, dtype=torch.bfloat16)
    made = make_features().from_states("v", torch.arange(2), torch.ones(2), whole[:2], torch.ones(2, 8))
    assert made.aux_hidden_states.untyped_storage().nbytes() == 2 * 3 * 8 * 2


def test_unknown_conventions_are_refused(meta):
    with pytest.raises(EyasError, match="output"):
        replace(meta, layer_convention="output")
