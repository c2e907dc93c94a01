"""Noise on hidden states."""

import pytest
import torch

from eyas.train.noise import AddGaussianNoise, AddUniformNoise, TransformTensors

KINDS = [AddGaussianNoise, AddUniformNoise]


def sample() -> dict:
    return {
        "hidden_states": torch.ones(50, 40),
        "verifier_last_hidden_states": torch.ones(50, 8),
        "input_ids": torch.arange(50),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_deviation_changes_nothing_and_draws_no_random_number(kind):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    noisy = kind(std=0.0)(sample())
    assert torch.equal(noisy["hidden_states"], sample()["hidden_states"])
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_named_tensors_change_and_the_dict_given_does_not(kind):
    data = sample()
    noisy = kind(std=0.1)(data)
    assert torch.equal(data["hidden_states"], torch.ones(50, 40))
    assert not torch.equal(noisy["hidden_states"], data["hidden_states"])
    assert noisy["verifier_last_hidden_states"] is data["verifier_last_hidden_states"]
    assert noisy["input_ids"] is data["input_ids"]
    other = kind(std=0.1, tensors=("verifier_last_hidden_states",))(data)
    assert other["hidden_states"] is data["hidden_states"]
    assert not torch.equal(other["verifier_last_hidden_states"], data["verifier_last_hidden_states"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(kind()(sample())["hidden_states"])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_gaussian_has_the_deviation_asked_for():
    torch.manual_seed(0)
    added = AddGaussianNoise(std=0.2)({"hidden_states": torch.zeros(500, 200)})["hidden_states"]
    assert added.std().item() == pytest.approx(0.2, rel=0.02) and added.mean().item() == pytest.approx(
        0, abs=0.005
    )


def test_uniform_is_bounded_by_its_width():
    torch.manual_seed(0)
    added = AddUniformNoise(std=0.2)({"hidden_states": torch.zeros(500, 200)})["hidden_states"]
    assert 0.199 < added.abs().max().item() <= 0.2
    assert added.std().item() == pytest.approx(0.2 / 3**0.5, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_is_kept(kind):
    assert kind()({"hidden_states": torch.ones(2, 2).bfloat16()})["hidden_states"].dtype == torch.bfloat16


def test_defaults_and_refusals():
    assert (TransformTensors().std, TransformTensors().tensors) == (0.05, ("hidden_states",))
    with pytest.raises(NotImplementedError):
        TransformTensors()({"hidden_states": torch.ones(1)})
    with pytest.raises(ValueError, match="negative"):
        AddGaussianNoise(std=-0.1)
    with pytest.raises(KeyError):
        AddGaussianNoise()({"input_ids": torch.ones(1)})
