"""A linear layer for few rows gives what nn.Linear gives."""

import pytest
import torch
from torch import nn

from eyas.kernels.few_rows import MOST_ROWS, FewRowsLinear, use_few_rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (1, 4), (2, 3, 5), (MOST_ROWS,), (MOST_ROWS + 1,)])
def test_any_number_of_rows_gives_the_same_product(shape, bias):
    plain = nn.Linear(24, 40, bias).requires_grad_(False)
    model = nn.Sequential(nn.Linear(24, 40, bias))
    model[0].load_state_dict(plain.state_dict())
    use_few_rows(model.requires_grad_(False))
    assert type(model[0]) is FewRowsLinear
    x = torch.randn(*shape, 24)
    torch.testing.assert_close(model(x), plain(x))


def test_weights_that_learn_get_gradients():
    layer = nn.Linear(6, 4)
    use_few_rows(layer)
    layer(torch.randn(3, 6)).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None


def test_linear_layers_of_other_kinds_are_left_alone():
    class Quantised(nn.Linear):
        pass

    model = nn.ModuleList([Quantised(4, 4)])
    use_few_rows(model)
    assert type(model[0]) is Quantised
