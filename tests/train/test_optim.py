from itertools import pairwise

import pytest
import torch

from eyas.config import TrainConfig
from eyas.train.optim import adamw, learning_rate, update


def test_warm_up_is_linear_and_the_cosine_ends_at_the_smallest_rate():
    config = TrainConfig(lr=1.0, warmup=0.1, min_lr=0.05)
    rates = [learning_rate(s, 50, config) for s in range(50)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[-1] == pytest.approx(0.05)
    assert all(a > b for a, b in pairwise(rates[4:]))


@pytest.mark.parametrize(("total", "warmup", "steps"), [(1000, 0.01, 10), (50, 0.1, 5), (8, 0.0, 0), (3, 1.0, 3)])
def test_warm_up_counts_optimiser_steps(total, warmup, steps):
    config = TrainConfig(lr=1.0, warmup=warmup)
    rates = [learning_rate(s, total, config) for s in range(total)]
    rising = sum(r == pytest.approx((i + 1) / steps) for i, r in enumerate(rates[:steps]))
    assert rising == steps
    assert total == steps or rates[steps] < 1.0


def test_only_matrices_decay_and_frozen_tensors_are_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).requires_grad_(False))
    groups = adamw(model, TrainConfig(weight_decay=0.1)).param_groups
    assert [(g["weight_decay"], [p.shape for p in g["params"]]) for g in groups] == [
        (0.1, [(2, 3)]),
        (0.0, [(2,)]),
    ]


@pytest.mark.parametrize(("limit", "scale"), [(1.0, 5.0), (0.0, 1.0), (10.0, 1.0)])
def test_gradients_are_scaled_to_the_limit_and_the_norm_before_is_returned(limit, scale):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    optimizer = adamw(torch.nn.ParameterList([p]), TrainConfig())
    assert update(optimizer, limit, torch.tensor(1.0)).item() == pytest.approx(5.0)
    assert (10 * optimizer.state[p]["exp_avg"]).tolist() == pytest.approx([3 / scale, 4 / scale])
    assert p.grad is None and p.abs().sum() > 0


@pytest.mark.parametrize(("gradient", "loss"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_nothing_changes_when_something_is_not_finite(gradient, loss):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = adamw(torch.nn.ParameterList([p]), TrainConfig())
    for g, x in ((1.0, 1.0), (gradient, loss)):
        before = p.detach().clone()
        p.grad = torch.full((2,), g)
        update(optimizer, 1.0, torch.tensor(x))
    assert (
        torch.equal(p, before)
        and optimizer.state[p]["step"] == 1
        and optimizer.state[p]["exp_avg"].isfinite().all()
    )
