import math

import pytest
import torch

from eyas.kernels.ttt_attention import ttt_attention


def plain(q, keys, values, own_keys, own_values, visible):
    """visible [A, N] bool: which step-0 keys each query sees."""
    group = q.shape[1] // keys.shape[1]
    out = []
    for head in range(q.shape[1]):
        shared = head // group
        first = (q[:, head] @ keys[:, shared].T).masked_fill(~visible, float("-inf"))  # [A, N]
        own = (q[:, head, None] * own_keys[:, shared]).sum(-1)  # [A, k]
        share = (torch.cat([first, own], 1) / math.sqrt(q.shape[-1])).softmax(-1)
        n = len(keys)
        out.append(share[:, :n] @ values[:, shared] + (share[:, n:, None] * own_values[:, shared]).sum(1))
    return torch.stack(out, 1)


def assert_equals_plain(rows, blocks, visible, n, k, heads=6, shared=2, d=4):
    generator = torch.Generator().manual_seed(k)
    shapes = [
        (len(rows), heads, d),
        (n, shared, d),
        (n, shared, d),
        (len(rows), shared, k, d),
        (len(rows), shared, k, d),
    ]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) * 2 for s in shapes]
    results = []
    for function, last in ((ttt_attention, (rows, blocks)), (plain, (visible,))):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves, *last)
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
        results.append([out.detach()] + [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_queries_see_earlier_rows_of_their_document_and_their_own_later_keys(k):
    rows = torch.tensor([1, 2, 5, 6])  # documents are rows 0..2, 3..4 (no query) and 5..7
    visible = torch.tensor(
        [
            [1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 0, 1, 1, 0],
        ]
    ).bool()
    assert_equals_plain(rows, [(0, 2, 0, 3), (2, 4, 5, 7)], visible, 8, k)


def test_a_long_document_is_cut_into_blocks():
    rows = torch.arange(1, 40, 2)
    blocks = [(0, 8, 0, 16), (8, 16, 0, 32), (16, 20, 0, 40)]
    assert_equals_plain(rows, blocks, torch.arange(40) <= rows[:, None], 40, 2)


def test_no_queries_at_all():
    empty, keys = torch.zeros(0, 2, 4, requires_grad=True), torch.randn(3, 1, 4, requires_grad=True)
    own = torch.zeros(0, 1, 2, 4)
    out = ttt_attention(empty, keys, keys, own, own, torch.zeros(0, dtype=torch.int64), [])
    out.sum().backward()
    assert out.shape == (0, 2, 4) and (keys.grad == 0).all()
