import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eyas.errors import EyasError, UsageError
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from tests.target.families import FAMILIES, save_model

SAMPLES = [[5, 9, 11], [7, 3, 8, 20, 33, 41, 9, 9, 2, 60, 61, 14], [90, 4, 17, 5, 6]]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory) -> Target:
    spec = TargetSpec.load(save_model(tmp_path_factory.mktemp(request.param), request.param))
    return Target.load(spec, attention="eager" if request.param == "gpt_oss" else "sdpa")


def reference(target: Target, ids: list[int]):
    with torch.no_grad():
        return target.model(torch.tensor([ids]), output_hidden_states=True)


def test_every_boundary_equals_the_library_s_hidden_states(target):
    layers = target.spec.num_layers
    [captured] = target.capture([SAMPLES[1]], list(range(layers)))
    expected = reference(target, SAMPLES[1])
    for i in range(layers):
        torch.testing.assert_close(captured.aux[:, i], expected.hidden_states[i][0], rtol=1e-5, atol=1e-5)


def test_last_is_before_the_final_norm_and_gives_the_target_s_logits(target):
    [captured] = target.capture([SAMPLES[1]], [0, target.spec.num_layers])
    expected = reference(target, SAMPLES[1])
    weights = TargetWeights(target.spec)
    normed = weights.final_norm()(captured.last)
    torch.testing.assert_close(normed, expected.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normed @ weights.lm_head().T, expected.logits[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(captured.aux[:, 1], captured.last)
    assert not torch.allclose(captured.last, normed, atol=0.1)


def test_a_batch_gives_the_states_of_its_samples_alone(target):
    together = target.capture(SAMPLES, [1, 2, 4])
    for ids, captured in zip(SAMPLES, together, strict=True):
        [alone] = target.capture([ids], [1, 2, 4])
        assert captured.aux.shape == (len(ids), 3, 32) and captured.last.shape == (len(ids), 32)
        torch.testing.assert_close(captured.aux, alone.aux, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(captured.last, alone.last, rtol=1e-5, atol=1e-5)


def test_hooks_are_gone_after_a_capture_and_after_a_failed_one(target):
    hooks = lambda: [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in target.model.modules()]  # noqa: E731
    target.capture(SAMPLES, [1])  # transformers sets hooks of its own on the first call
    before = hooks()
    target.capture(SAMPLES, [2, 3])
    with pytest.raises(IndexError):
        target.capture([[10_000]], [1])
    assert hooks() == before


@pytest.mark.parametrize("layers", [[], [2, 1], [1, 1], [-1, 2], [1, 5]])
def test_unfit_layers_are_refused(target, layers):
    with pytest.raises(UsageError, match="distinct, ascending"):
        target.capture(SAMPLES, layers)


def test_states_come_in_the_model_s_dtype(tmp_path):
    spec = TargetSpec.load(save_model(tmp_path, "llama"))
    [captured] = Target.load(spec, dtype="bfloat16").capture(SAMPLES[:1], [1, 2])
    assert captured.aux.dtype == captured.last.dtype == torch.bfloat16


def test_blocks_that_return_tuples_are_read(tmp_path):
    spec = TargetSpec.load(save_model(tmp_path, "llama"))
    plain = Target.load(spec)
    [expected] = plain.capture(SAMPLES[:1], [3])
    # older transformers and much remote code return (hidden, attention, ...)
    plain.blocks[-1].register_forward_hook(lambda _, __, out: (out, None))
    plain.decoder.norm.register_forward_pre_hook(
        lambda _, args: args[0][0] if isinstance(args[0], tuple) else None
    )
    [captured] = plain.capture(SAMPLES[:1], [3])
    assert torch.equal(captured.last, expected.last)


def test_a_model_whose_blocks_are_not_found_is_named(tmp_path):
    spec = TargetSpec.load(save_model(tmp_path, "llama"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.model.layers = model.model.layers[:2]
    with pytest.raises(EyasError, match=r"list of 4 blocks, found 0; module lists: model.layers \(2\)"):
        Target(model, spec)


def test_weights_that_are_not_in_the_shards_are_never_made_up(tmp_path):
    shard = save_model(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(shard)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(EyasError, match=r"1 weights are not in the shards: model\.layers\.2\.mlp\.up_proj"):
        Target.load(TargetSpec.load(tmp_path))


def test_states_can_be_trained_on(tmp_path):
    [captured] = Target.load(TargetSpec.load(save_model(tmp_path, "llama"))).capture(SAMPLES[:1], [1])
    weight = torch.ones(32, requires_grad=True)
    (captured.aux * weight).sum().backward()
    assert weight.grad is not None


def test_an_unknown_attention_backend_names_the_option(tmp_path):
    spec = TargetSpec.load(save_model(tmp_path, "llama"))
    with pytest.raises(EyasError, match=r"target\.attention"):
        Target.load(spec, attention="flash_attention_2")
