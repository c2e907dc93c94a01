"""The training pass against plain autograd, on every variant."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.draft import TrainBatch, counted_rows
from tests.draft import reference

FLAGS = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]


def target_probs(model, documents):
    """The target's distributions over the draft vocabulary, [T, Vd] for each document."""
    return [(model.target_norm(d.last) @ model.target_lm_head.T).softmax(-1) for d in documents]


def plain(model, documents, steps, decay=0.8):
    """Loss and gradients of the reference."""
    w = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    value = reference.loss(
        model.config, w, model.embed_tokens.double(), target_probs(model, documents), documents, steps, decay
    )
    if value.requires_grad:
        value.backward()
    return value.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in w.items()}


def compacted(model, documents, steps, decay=0.8):
    model.zero_grad()
    out = model(batch=reference.pack(documents), ttt_steps=steps, ttt_step_loss_decay=decay)
    out.loss.backward()
    return out, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def assert_equal(model, documents, steps):
    value, grads = plain(model, documents, steps)
    out, ours = compacted(model, documents, steps)
    torch.testing.assert_close(out.loss.detach(), value, rtol=1e-10, atol=1e-12)
    for name, grad in grads.items():
        if name != "lm_head.weight" or model.config.train_lm_head:
            torch.testing.assert_close(ours[name], grad, rtol=1e-7, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    return out


masks = st.lists(st.lists(st.booleans(), min_size=2, max_size=14), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    masks=masks, steps=st.integers(1, 7), heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]), data=st.data()
)
def test_loss_and_gradients_equal_plain_autograd(make_draft, make_documents, masks, steps, heads, data):
    flags = {flag: data.draw(st.booleans(), flag) for flag in FLAGS}
    flags["fc_norm"] &= not flags["norm_before_fc"]
    model = make_draft(
        vocab=data.draw(st.sampled_from([40, 64, 320]), "draft vocabulary"),
        seed=data.draw(st.integers(0, 3), "seed"),
        train_lm_head=data.draw(st.booleans(), "train_lm_head"),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        **flags,
    )
    assert_equal(model, make_documents(masks, steps), steps)


@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_every_variant_with_documents_shorter_than_the_unroll(make_draft, make_documents, flag):
    model = make_draft(train_lm_head=True, **({flag: True} if flag else {}))
    documents = make_documents([[False, False, True, True, False, True], [True, True], [False, True, True]])
    assert_equal(model, documents, steps=7)


def test_a_batch_without_counted_rows_costs_nothing_and_moves_nothing(make_draft, make_documents):
    out, grads = compacted(make_draft(), make_documents([[True, False, False], [False] * 5]), steps=3)
    assert out.loss == 0
    assert out.counts.tolist() == [0, 0, 0]
    assert all((g == 0).all() for g in grads.values())


def test_losses_of_micro_batches_add_up_to_the_loss_of_the_whole(make_draft, make_documents):
    model = make_draft()
    documents = make_documents(
        [[False, True], [False] + [True] * 11, [False] * 3, [True] * 4, [False, False, True]]
    )
    whole, grads = compacted(model, documents, steps=4)
    parts = [reference.pack(documents[:2]), reference.pack(documents[2:3]), reference.pack(documents[3:])]
    totals = sum(counted_rows(b.supervised, b.doc_end, 4).sum(1) for b in parts)
    model.zero_grad()
    losses = [model(batch=b, ttt_steps=4, ttt_step_loss_decay=0.8, totals=totals).loss for b in parts]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(sum(x.detach() for x in losses), whole.loss.detach())
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, grads[name])


def test_loss_is_a_weighted_mean_of_the_steps_means(make_draft, make_documents):
    out, _ = compacted(make_draft(), make_documents([[False, True, True, True, False, True]] * 3), steps=3)
    means = out.kl / out.counts
    torch.testing.assert_close(out.loss.detach(), (means * torch.tensor([1, 0.8, 0.64])).sum() / 2.44)


def test_a_step_that_nobody_counts_keeps_its_weight(make_draft, make_documents):
    out, _ = compacted(make_draft(), make_documents([[False, True]]), steps=2, decay=0.5)
    assert out.counts.tolist() == [1, 0]
    torch.testing.assert_close(out.loss.detach(), out.kl[0] / 1.5)


@pytest.mark.parametrize("vocab", [64, 320])
def test_statistics_are_those_of_the_full_logits(make_draft, make_documents, vocab):
    model = make_draft(vocab)
    documents = make_documents([[False, True, True, False, True, True, True], [False, False, True]])
    steps, first = 3, 0
    with torch.no_grad():
        out = model(batch=reference.pack(documents), ttt_steps=steps, ttt_step_loss_decay=1.0)
    assert not out.loss.requires_grad
    ids = model.draft_ids()
    hits, overlap, seen = torch.zeros(steps), torch.zeros(steps, dtype=torch.float64), torch.zeros_like(out.hit)
    for document, probs in zip(documents, target_probs(model, documents), strict=True):
        logits = reference.step_logits(
            model.config, dict(model.named_parameters()), model.embed_tokens.double(), document, steps
        )
        for k in range(steps):
            for t in range(len(document.x) - 1 - k):
                if document.mask[t + 1 + k]:
                    q, p = logits[k][t].softmax(-1), probs[t + 1 + k]
                    assert out.draft_tokens[k, first + t] == ids[q.argmax()]
                    assert out.hit[k, first + t] == (q.argmax() == p.argmax())
                    hits[k] += q.argmax() == p.argmax()
                    overlap[k] += torch.minimum(p, q).sum()
                    seen[k, first + t] = True
        first += len(document.x) - 1
    assert (out.draft_tokens[~seen] == -1).all() and not out.hit[~seen].any()
    assert out.hits.tolist() == hits.tolist() and out.counts.tolist() == seen.sum(1).tolist()
    torch.testing.assert_close(out.overlap, overlap)


def test_the_tokens_fed_are_those_of_the_data_whatever_the_draft_says(make_draft, make_documents):
    model, documents = make_draft(), make_documents([[False, True, True, True, True, True]])
    with torch.no_grad():
        before = model(batch=reference.pack(documents), ttt_steps=3, ttt_step_loss_decay=1.0)
        model.lm_head.weight.zero_()  # all logits equal: the arg-max is draft id 0 everywhere
        after = model(batch=reference.pack(documents), ttt_steps=3, ttt_step_loss_decay=1.0)
        logits = reference.step_logits(
            model.config, dict(model.named_parameters()), model.embed_tokens.double(), documents[0], 3
        )
    assert (after.draft_tokens[after.draft_tokens >= 0] == model.draft_ids()[0]).all()
    assert (before.draft_tokens >= 0).equal(after.draft_tokens >= 0)
    assert all((step == 0).all() for step in logits)
    assert_equal(model, documents, 3)


def test_runs_in_float32_and_bfloat16(make_draft, make_documents):
    documents = make_documents([[False] + [True] * 9, [False, False, True, True]])
    exact, _ = compacted(make_draft(), documents, steps=3)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        out, grads = compacted(make_draft(dtype=dtype), documents, steps=3)
        assert out.loss.dtype == torch.float32
        assert grads["fc.weight"].dtype == dtype
        torch.testing.assert_close(out.loss.double(), exact.loss, rtol=tolerance, atol=0)


def test_bfloat16_products_over_float32_weights(make_draft, make_documents):
    model = make_draft(dtype=torch.float32)
    low = {n: p.bfloat16() for n, p in model.named_parameters()}
    batch = reference.pack(make_documents([[False] + [True] * 9]))
    out = torch.func.functional_call(
        model, low, kwargs={"batch": batch, "ttt_steps": 2, "ttt_step_loss_decay": 0.8}
    )
    out.loss.backward()
    assert model.fc.weight.grad.dtype == torch.float32 and model.fc.weight.grad.abs().sum() > 0


def test_only_rows_with_a_counted_target_ahead_are_computed(make_draft, make_documents):
    from eyas.draft.rows import row_plan

    documents = make_documents([[False] * 8 + [True] * 4 + [False] * 8, [False] * 30, [False, True]])
    plan = row_plan(reference.pack(documents), 3)
    # rows 5..10 see tokens 8..11 within three steps; the last document's one row sees its token at step 0 only
    assert [s.seen.rows.tolist() for s in plan.steps] == [[5, 6, 7, 8, 9, 10, 48], [5, 6, 7, 8, 9], [5, 6, 7, 8]]
    assert plan.counts.tolist() == [5, 4, 4]


def test_the_public_form_agrees_with_the_compact_one(make_draft, make_documents):
    model, documents = make_draft(), make_documents([[False, True, True, True, False], [False] * 2 + [True] * 3])
    batch = reference.pack(documents)
    padding, rows = 5, len(batch.input_ids)

    def padded(x):
        return torch.cat([x, x.new_zeros(padding, *x.shape[1:])])[None]

    last = torch.cat([d.last[1:] for d in documents])
    keys = {
        "hidden_states": padded(batch.aux),
        "input_ids": padded(batch.input_ids),
        "lengths": torch.tensor([4, 4]),
        "loss_mask": padded(batch.supervised),
        "position_ids": padded(torch.arange(1, 5).repeat(2)),  # a constant offset is invisible to RoPE
    }
    compact = model(batch=batch, ttt_steps=3, ttt_step_loss_decay=1.0)
    tokens, loss, metrics = model(**keys, verifier_last_hidden_states=padded(last))
    torch.testing.assert_close(loss, compact.loss)
    assert [t.shape for t in tokens] == [(1, rows + padding)] * 3
    for k in range(3):
        seen = compact.draft_tokens[k] >= 0
        assert torch.equal(model.to_target_ids(tokens[k][0, :rows][seen]), compact.draft_tokens[k][seen])
        assert (tokens[k][0, :rows][~seen] == -1).all() and (tokens[k][0, rows:] == -1).all()
        torch.testing.assert_close(metrics[f"loss_{k}"], compact.kl[k] / compact.counts[k])
    assert set(metrics) == {"loss"} | {f"{n}_{k}" for n in ("loss", "full_acc", "cond_acc") for k in range(3)}
    right = [set(compact.hit[k].nonzero()[:, 0].tolist()) for k in range(3)]
    assert metrics["full_acc_1"] * compact.counts[1] == len(right[0] & right[1])

    alone = model(**{k: v for k, v in keys.items() if k != "loss_mask"}, ttt_steps=3)
    for k in range(3):  # every row whose token lies in its document
        assert (alone[k][0] >= 0).tolist() == ([True] * (4 - k) + [False] * k) * 2 + [False] * padding
        seen = tokens[k] >= 0
        assert torch.equal(alone[k][seen], tokens[k][seen])


def test_sizes_that_contradict_each_other_are_named(make_draft, make_documents):
    model, batch = make_draft(), reference.pack(make_documents([[False, True, True]]))
    with pytest.raises(ValueError, match="1 targets for 2 supervised rows"):
        model(batch=batch._replace(targets=batch.targets[:1]), ttt_steps=1, ttt_step_loss_decay=1.0)
    with pytest.raises(ValueError, match=r"as many rows.*'aux': \[1, 96\]"):
        model(batch=TrainBatch(*batch)._replace(aux=batch.aux[:1]), ttt_steps=1, ttt_step_loss_decay=1.0)
