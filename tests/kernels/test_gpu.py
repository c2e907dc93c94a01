"""The Triton kernels against the plain versions: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Older interpreters do not know numpy 2.4.
pytest.importorskip("triton", None if CUDA else "3.7", reason="no Triton whose kernels could run here")

from eyas.kernels.elementwise_gpu import rotate, swiglu_backward, swiglu_forward  # noqa: E402
from eyas.kernels.linear_kl import RowStats  # noqa: E402
from eyas.kernels.linear_kl_gpu import GPUChunks  # noqa: E402
from eyas.kernels.ttt_attention import KEY_BLOCK, ttt_attention, visible  # noqa: E402
from eyas.kernels.ttt_attention_gpu import TTTAttention  # noqa: E402
from tests.kernels.test_linear_kl import inputs, plain_linear_kl  # noqa: E402


def error(found, exact):
    found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
    assert found.isfinite().all()
    return float((found - exact).norm() / exact.norm().clamp(min=1.0))  # some exact gradients are zero


def assert_attention_is_right(rows, starts, n, k, heads, shared, d, dtype, bound):
    generator = torch.Generator().manual_seed(n + k)
    shapes = [(len(rows), heads, d), *[(n, shared, d)] * 2, *[(len(rows), shared, k, d)] * 2]
    given = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    seed, seen = torch.randn(shapes[0], generator=generator).to(dtype), visible(rows, starts, n)
    exact = [x.double().requires_grad_() for x in given]
    out = ttt_attention(*exact, seen)
    out.backward(seed.double())
    leaves = [x.to(DEVICE).requires_grad_() for x in given]
    ours = TTTAttention.apply(*leaves, *(x.to(DEVICE) for x in seen[:3]), KEY_BLOCK)
    ours.backward(seed.to(DEVICE))
    assert error(ours, out) < bound
    for name, leaf, reference in zip(("q", "keys", "values", "own_k", "own_v"), leaves, exact, strict=True):
        if reference.grad is not None and leaf.numel():
            assert error(leaf.grad, reference.grad) < bound, name


@pytest.mark.parametrize(("heads", "shared", "d"), [(4, 2, 64), (3, 1, 48), (2, 2, 128), (2, 1, 256)])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_attention_of_every_shape(heads, shared, d, k):
    rows = torch.tensor([3, 4, 9, 60, 61, 62, 80, 81, 82, 90, 150])
    starts = torch.tensor([0, 0, 0, 50, 50, 50, 75, 75, 75, 75, 140])
    assert_attention_is_right(rows, starts, 170, k, heads, shared, d, torch.float32, 1e-5)


@settings(max_examples=12 if CUDA else 4, deadline=None)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=4),
    st.integers(0, 4),
    st.floats(0.05, 1.0),
    st.integers(0, 9),
)
def test_attention_of_any_documents_and_rows(lengths, k, share, seed):
    length = torch.tensor(lengths)
    starts = (length.cumsum(0) - length).repeat_interleave(length)
    chosen = (torch.rand(len(starts), generator=torch.Generator().manual_seed(seed)) < share).nonzero()[:, 0]
    assert_attention_is_right(chosen, starts[chosen], len(starts), k, 4, 2, 32, torch.float32, 1e-5)


@pytest.mark.skipif(not CUDA, reason="the interpreter's products of bfloat16 are wrong")
def test_attention_in_bfloat16():
    rows = torch.arange(5, 200, 2)
    assert_attention_is_right(rows, rows // 100 * 100, 200, 2, 4, 2, 64, torch.bfloat16, 1e-2)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (50, 130), (90, 4099)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_divergence_statistics_and_gradients(rows, vocab, dtype, bound):
    if dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter's bfloat16 is wrong")
    x, weight, target_x, target_weight, target_rows, scale = inputs(rows, vocab, torch.float32)
    given = [t.detach().to(dtype) for t in (x, weight, target_x, target_weight)]
    leaf = given[0].double().requires_grad_()
    loss, exact = plain_linear_kl(leaf, *(t.double() for t in given[1:]), target_rows, scale.double())
    loss.backward()
    on = [t.to(DEVICE) for t in given]
    chunks, (n, last) = GPUChunks(on[0], len(on[3])), (rows, int(target_rows[-1]))
    types = (torch.float32, torch.float32, torch.int64, torch.bool)
    stats = RowStats(*(torch.zeros(n, dtype=t, device=DEVICE) for t in types))
    grad = chunks(*on[:2], on[2][: last + 1], on[3], target_rows.to(DEVICE), scale.to(DEVICE), stats)
    assert error(grad.to(dtype) @ on[1], leaf.grad) < bound
    assert error(stats.kl, exact.kl) < bound and error(stats.overlap, exact.overlap) < bound
    if dtype == torch.float32:
        assert torch.equal(stats.token.cpu(), exact.token) and torch.equal(stats.hit.cpu(), exact.hit)


@pytest.mark.parametrize(("heads", "d"), [(3, 64), (8, 128), (5, 40)])
def test_rotation_and_its_inverse(heads, d):
    x, positions = torch.randn(37, heads, d, device=DEVICE), torch.randint(0, 50, (37,), device=DEVICE)
    angles = torch.rand(50, d // 2, device=DEVICE) * 6
    out = rotate(x, angles.cos(), angles.sin(), positions, False)
    a, b = x.double().chunk(2, -1)
    cos, sin = (t(angles[positions].double())[:, None] for t in (torch.cos, torch.sin))
    assert error(out, torch.cat([a * cos - b * sin, b * cos + a * sin], -1)) < 1e-6
    assert error(rotate(out, angles.cos(), angles.sin(), positions, True), x) < 1e-6


def test_swiglu_and_its_gradients():
    gate, up, seed = (torch.randn(31, 77, device=DEVICE) * 3 for _ in range(3))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    exact = torch.nn.functional.silu(leaves[0]) * leaves[1]
    exact.backward(seed.double())
    assert error(swiglu_forward(gate, up), exact) < 1e-6
    for found, leaf in zip(swiglu_backward(seed, gate, up), leaves, strict=True):
        assert error(found, leaf.grad) < 1e-6
