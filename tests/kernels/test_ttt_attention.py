import math

import pytest
import torch

from eyas.kernels import ttt_attention as module
from eyas.kernels.ttt_attention import ttt_attention, visible


def plain(q, keys, values, own_keys, own_values, seen):
    """seen [A, N] bool: which step-0 keys each query sees."""
    group = q.shape[1] // keys.shape[1]
    out = []
    for head in range(q.shape[1]):
        shared = head // group
        first = (q[:, head] @ keys[:, shared].T).masked_fill(~seen, float("-inf"))  # [A, N]
        own = (q[:, head, None] * own_keys[:, shared]).sum(-1)  # [A, k]
        share = (torch.cat([first, own], 1) / math.sqrt(q.shape[-1])).softmax(-1)
        n = len(keys)
        out.append(share[:, :n] @ values[:, shared] + (share[:, n:, None] * own_values[:, shared]).sum(1))
    return torch.stack(out, 1)


def assert_equals_plain(rows, starts, n, k, heads=6, shared=2, d=4):
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
    key = torch.arange(n)
    seen = (key <= rows[:, None]) & (key >= starts[:, None])
    for function, last in ((ttt_attention, visible(rows, starts, n)), (plain, seen)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves, last)
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
        results.append([out.detach()] + [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_queries_see_earlier_rows_of_their_document_and_their_own_later_keys(k):
    rows = torch.tensor([1, 2, 5, 6])  # documents are rows 0..2, 3..4 (no query) and 5..7
    assert_equals_plain(rows, torch.tensor([0, 0, 5, 5]), 8, k)


def test_a_long_document_is_cut_into_blocks(monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", 8)
    rows = torch.arange(1, 40, 2)
    starts = torch.zeros(20, dtype=torch.int64)
    assert visible(rows, starts, 40).blocks == [(0, 8, 0, 16), (8, 16, 0, 32), (16, 20, 0, 40)]
    assert_equals_plain(rows, starts, 40, 2)


def test_no_queries_at_all():
    empty, keys = torch.zeros(0, 2, 4, requires_grad=True), torch.randn(3, 1, 4, requires_grad=True)
    own, none = torch.zeros(0, 1, 2, 4), torch.zeros(0, dtype=torch.int64)
    out = ttt_attention(empty, keys, keys, own, own, visible(none, none, 3))
    out.sum().backward()
    assert out.shape == (0, 2, 4) and (keys.grad == 0).all()
