import pytest
import torch

from eyas.kernels.linear_kl import RowStats, linear_kl


def inputs(rows, vocab, dtype=torch.float64, hidden=16):
    generator = torch.Generator().manual_seed(rows + vocab)
    targets = max(1, rows // 3)
    x, weight, target_x, target_weight = (
        torch.randn(n, hidden, generator=generator, dtype=torch.float64).to(dtype)
        for n in (rows, vocab, targets, vocab)
    )
    target_rows = torch.randint(0, targets, (rows,), generator=generator).sort().values
    scale = torch.rand(rows, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    return x.requires_grad_(), weight.requires_grad_(), target_x, target_weight, target_rows, scale


def plain_linear_kl(x, weight, target_x, target_weight, target_rows, scale):
    """The same by plain autograd, all logits at once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    log_p = torch.log_softmax((target_x @ target_weight.T).to(wide), -1).detach()[target_rows]  # [R, Vd]
    log_q = torch.log_softmax((x @ weight.T).to(wide), -1)  # [R, Vd]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)  # [R]
    token = log_q.argmax(-1)
    overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    stats = RowStats(kl.detach(), overlap.detach(), token, token == log_p.argmax(-1))
    return (kl * scale).sum(), stats


def both(args):
    results = []
    for function in (linear_kl, plain_linear_kl):
        x, weight = (a.detach().clone().requires_grad_(a.requires_grad) for a in args[:2])
        loss, stats = function(x, weight, *args[2:])
        (3 * loss).backward()
        results.append((loss.detach(), stats, x.grad, weight.grad))
    return results


@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (50, 64), (90, 130), (700, 8192)])
def test_loss_statistics_and_gradients_equal_the_plain_version(rows, vocab):
    ours, plain = both(inputs(rows, vocab))  # 700 rows over 8192 ids take three chunks
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_lower_precision_stays_close_and_loss_is_float32(dtype, tolerance):
    args = inputs(60, 128, dtype)
    (loss, stats, grad, _), _ = both(args)
    exact, *_ = both([a.double() if a.is_floating_point() else a for a in args])
    assert loss.dtype == stats.kl.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(loss.double(), exact[0], rtol=tolerance, atol=0)
    torch.testing.assert_close(grad.double(), exact[2], rtol=0, atol=tolerance * exact[2].abs().max().item())


def test_a_frozen_weight_gets_no_gradient():
    x, weight, *rest = inputs(9, 20)
    loss, _ = linear_kl(x, weight.detach(), *rest)
    loss.backward()
    assert x.grad is not None and weight.grad is None


def test_no_grad_gives_the_same_numbers():
    args = inputs(9, 20)
    with torch.no_grad():
        loss, stats = linear_kl(*args)
    assert not loss.requires_grad
    torch.testing.assert_close(stats, linear_kl(*args)[1])


def test_the_divergence_is_from_the_target_to_the_draft():
    logits = torch.tensor([[0.9, 0.1]]).log()  # target
    uniform = torch.zeros(1, 2)
    eye, one = torch.eye(2), torch.ones(1)
    loss, stats = linear_kl(uniform, eye, logits, eye, torch.zeros(1, dtype=torch.int64), one)
    assert loss.item() == pytest.approx(0.368, abs=5e-4)  # the other way round: 0.511
    assert stats.overlap.item() == pytest.approx(0.6)


def test_equal_draft_and_target_have_no_loss_and_full_overlap():
    x, weight, *_ = inputs(12, 64)
    loss, stats = linear_kl(x, weight, x.detach(), weight.detach(), torch.arange(12), torch.ones(12).double())
    assert abs(loss.item()) < 1e-12 and stats.hit.all()
    torch.testing.assert_close(stats.overlap, torch.ones(12).double())
