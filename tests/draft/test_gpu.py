"""The training pass on a GPU, in float32 and bfloat16, against the CPU's in double precision."""

import copy

import pytest
import torch

from eyas.draft import TrainBatch
from eyas.draft.rows import row_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_loss_and_gradients_are_those_of_the_cpu(make_draft):
    generator = torch.Generator().manual_seed(0)
    model = make_draft()
    length = torch.tensor([70, 5, 130])
    n, h = int(length.sum()), model.config.hidden_size
    supervised = torch.rand(n, generator=generator) < 0.4
    end = length.cumsum(0)
    batch = TrainBatch(
        torch.randint(0, model.config.vocab_size, (n,), generator=generator),
        torch.randn(n, model.config.num_aux * h, generator=generator),
        torch.randn(int(supervised.sum()), h, generator=generator),
        supervised,
        (end - length).repeat_interleave(length),
        end.repeat_interleave(length),
    )
    exact = copy.deepcopy(model).double()
    expected = exact.ttt(batch._replace(aux=batch.aux.double(), targets=batch.targets.double()), 7, 0.8)
    expected.loss.backward()
    plan = row_plan(batch, 7)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        ours = copy.deepcopy(model).to("cuda", dtype)
        there = {f: getattr(batch, f).cuda() for f in ("input_ids", "aux", "targets")}
        out = ours.ttt(batch._replace(**there, plan=plan), 7, 0.8)
        out.loss.backward()
        assert float(out.loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=bound)
        errors = {
            name: float((p.grad.double().cpu() - q.grad).norm() / q.grad.norm())
            for (name, p), q in zip(ours.named_parameters(), exact.parameters(), strict=True)
            if q.grad is not None
        }
        assert max(errors.values()) < bound, (dtype, errors)
