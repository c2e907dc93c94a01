from dataclasses import replace

import pytest
import torch

from eyas.draft import DraftShapeError, Eagle3DraftModel
from eyas.errors import EyasError

LAYER = {
    "input_layernorm": [32],
    "hidden_norm": [32],
    "post_attention_layernorm": [32],
    "self_attn.q_proj": [32, 64],
    "self_attn.k_proj": [16, 64],
    "self_attn.v_proj": [16, 64],
    "self_attn.o_proj": [32, 32],
    "mlp.gate_proj": [64, 32],
    "mlp.up_proj": [64, 32],
    "mlp.down_proj": [32, 64],
}


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ({}, {}),
        ({"norm_before_fc": True}, {"input_norm.weight": [96]}),
        ({"fc_norm": True}, {f"fc_norm.{j}.weight": [32] for j in range(3)}),
    ],
)
def test_tensors_have_the_names_and_shapes_that_servers_load_and_nothing_of_the_target(make_draft, flags, more):
    found = {name: list(t.shape) for name, t in make_draft(**flags).state_dict().items()}
    layer = {f"layers.0.{name}.weight": shape for name, shape in LAYER.items()}
    rest = {"fc.weight": [32, 96], "norm.weight": [32], "lm_head.weight": [64, 32], "d2t": [64], "t2d": [320]}
    assert found == layer | rest | more


def test_a_full_vocabulary_has_no_tables(make_draft):
    model = make_draft(vocab=320)
    assert "d2t" not in model.state_dict() and "t2d" not in model.state_dict()
    assert model.to_target_ids(torch.tensor([7])) == 7


def test_lm_head_and_the_target_are_frozen_unless_asked(make_draft):
    frozen = {n for n, p in make_draft().named_parameters() if not p.requires_grad}
    assert frozen == {"lm_head.weight"}
    assert all(p.requires_grad for p in make_draft(train_lm_head=True).parameters())


def test_the_target_moves_with_the_model_and_keeps_its_rows(make_draft, target):
    model = make_draft(dtype=torch.bfloat16)
    head = target[1].lm_head()
    assert torch.equal(model.target_lm_head, head[torch.arange(0, 320, 5)].bfloat16())
    assert model.target_norm.weight.dtype == model.embed_tokens.dtype == torch.bfloat16
    assert torch.equal(model.to_target_ids(torch.arange(64)), torch.arange(0, 320, 5))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (lambda t2d, d2t: (None, None), "draft_vocab_size 64 of a target vocabulary of 320 needs a mapping"),
        (lambda t2d, d2t: (t2d, None), "d2t is missing"),
        (lambda t2d, d2t: (None, d2t), "t2d is missing"),
        (lambda t2d, d2t: (t2d[None], d2t), r"t2d: expected 1-D length 320, got \(1, 320\)"),
        (lambda t2d, d2t: (t2d, d2t[:-1]), r"d2t: expected 1-D length 64, got \(63,\)"),
        (lambda t2d, d2t: (t2d, d2t - 1), "d2t: draft row 0 decodes to target id -1"),
        (lambda t2d, d2t: (t2d.roll(1), d2t), "t2d keeps 64 ids, d2t decodes to 64"),
    ],
)
def test_tables_that_do_not_fit_the_vocabulary_are_refused(make_draft, tables, message):
    model = make_draft()
    with pytest.raises(EyasError, match=message):
        Eagle3DraftModel(model.config, *tables(model.t2d, model.d2t))


def test_another_target_is_refused(make_draft, target):
    model = make_draft()
    other = Eagle3DraftModel(
        replace(model.config, vocab_size=400), torch.cat([model.t2d, torch.zeros(80).bool()]), model.d2t
    )
    with pytest.raises(DraftShapeError, match=r"embed_tokens is \[320, 32\], the draft expects \[400, 32\]"):
        other.load_target(target[1])


def test_a_draft_without_its_target_says_so(make_draft):
    model = Eagle3DraftModel(replace(make_draft().config, draft_vocab_size=320))
    with pytest.raises(EyasError, match="no target yet"):
        model(torch.zeros(1, 3, 96), torch.zeros(1, 3, dtype=torch.int64))


def test_each_aux_state_is_normed_alone_or_all_together(make_draft):
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(5, 3, 32, generator=generator).double() * torch.tensor([1.0, 10.0, 100.0]).double()[:, None]
    seen = []
    for flag in ("fc_norm", "norm_before_fc"):
        model = make_draft(**{flag: True})
        for norm in [*model.fc_norm] if flag == "fc_norm" else [model.input_norm]:
            norm.weight.data.fill_(1.0)
        model.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0].view(5, 3, 32)))
        model.fuse(aux.flatten(1))
    apart, together = (x.square().mean(-1).sqrt().mean(0).tolist() for x in seen)
    assert apart == pytest.approx([1, 1, 1], rel=1e-3)
    assert together[2] > 1.5 and together[0] < 0.05
