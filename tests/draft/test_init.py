from dataclasses import replace

import pytest
import torch

from eyas.draft import init_weights
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from tests.tiny import make_target


def test_what_agrees_in_shape_comes_from_the_target(make_draft, target):
    spec, weights = target
    model = make_draft(dtype=torch.float32)
    report = init_weights(model, weights, spec)
    last, h = weights.layer(5), 32
    layer = model.layers[0]
    assert torch.equal(layer.self_attn.q_proj.weight[:, h:], last["self_attn.q_proj.weight"])
    assert (layer.self_attn.q_proj.weight[:, :h] == 0).all()
    assert torch.equal(layer.mlp.down_proj.weight, last["mlp.down_proj.weight"])
    assert torch.equal(layer.hidden_norm.weight, last["input_layernorm.weight"])
    assert torch.equal(model.lm_head.weight, model.target_lm_head)
    aux = torch.randn(4, 96)
    assert torch.equal(model.fuse(aux), aux[:, 64:])
    embedding_norm = "layers.0.input_layernorm.weight"
    assert set(report["copied"]) == {n for n, _ in model.named_parameters()} - {embedding_norm}
    assert set(report["constant"]) == {embedding_norm}
    assert report["random"] == {}
    assert report["copied"]["layers.0.mlp.up_proj.weight"] == "layer 5 mlp.up_proj.weight"


def test_what_does_not_agree_is_random_and_said_so(make_draft, target):
    spec, weights = target
    model = make_draft(num_attention_heads=8, intermediate_size=48, fc_norm=True)
    report = init_weights(model, weights, spec)
    assert report["random"]["layers.0.self_attn.q_proj.weight"] == "the target's is [32, 64], the draft's [64, 64]"
    assert (
        "layers.0.mlp.gate_proj.weight" in report["random"]
        and "layers.0.self_attn.k_proj.weight" in report["copied"]
    )
    assert report["constant"]["fc_norm.0.weight"] == "1: the target has no such tensor"
    assert model.layers[0].mlp.gate_proj.weight.detach().std().item() == pytest.approx(0.02, rel=0.1)


def test_random_weights_follow_the_seed_and_keep_the_targets_head(make_draft, target):
    spec, weights = target
    first, again, other = (make_draft(seed=i) for i in range(3))
    report = init_weights(first, weights, spec, "random", seed=7)
    init_weights(again, weights, spec, "random", seed=7)
    init_weights(other, weights, spec, "random", seed=8)
    assert set(report["copied"]) == {"lm_head.weight", "norm.weight"}
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert torch.equal(first.lm_head.weight, first.target_lm_head)


def test_projections_that_the_target_norms_or_shifts_are_not_copied(make_draft, target, tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = make_target(tmp_path / "target")
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    (folder / "model.safetensors").unlink()
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(folder)
    spec = TargetSpec.load(folder)
    report = init_weights(make_draft(), TargetWeights(spec), spec)
    assert "norm or a bias behind it" in report["random"]["layers.0.self_attn.q_proj.weight"]
    assert "layers.0.self_attn.v_proj.weight" in report["copied"]


def test_gemma_norms_are_turned_into_plain_ones(make_draft, target):
    spec, weights = target
    model, plain = make_draft(), make_draft()
    init_weights(plain, weights, spec)
    gemma = TargetWeights(replace(spec, model_type="gemma"))
    init_weights(model, gemma, gemma.spec)
    torch.testing.assert_close(model.norm.weight, plain.norm.weight + 1)
    torch.testing.assert_close(model.layers[0].hidden_norm.weight, plain.layers[0].hidden_norm.weight + 1)
