"""verify finds what engines are silent about, in folders made here and elsewhere."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import UsageError
from eyas.export.verify import check, verify
from eyas.target.weights import TargetWeights
from tests.export.conftest import LAYOUTS, trained, write_folder
from tests.export.engine import engine_logits

FC, Q = "fc.weight", "layers.0.self_attn.q_proj.weight"


def errors(result) -> str:
    return "\n".join(f["message"] for f in result["findings"] if f["level"] == "error")


def warnings(result) -> str:
    return "\n".join(f["message"] for f in result["findings"] if f["level"] == "warning")


def mutated(tmp_path, draft, spec, layout="vllm", change=None, tensors=None):
    """What verify says of a folder with something changed in it."""
    return check(write_folder(tmp_path / layout, layout, draft, spec, change, tensors=tensors), spec)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [{}, {"vocab": 320}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True, "head_dim": 16}]
)
def test_an_export_proves_itself_and_computes_what_the_engines_do(tmp_path, spec, features, layout, dtype, shape):
    draft = trained(spec, **shape)
    folder = write_folder(tmp_path / "out", layout, draft, spec, dtype=dtype)
    result = check(folder, spec, draft, features)
    assert result["ok"] and result["format"] == layout and not warnings(result), result["findings"]
    assert result["proof"]["rows"] == 9 and result["proof"]["largest_difference"] <= 1e-6

    # the same folder through the engines' definition, written out without any of the draft's code
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    state = {n.replace("midlayer.", "layers.0."): t.float() for n, t in state.items() if n not in ("d2t", "t2d")}
    rounded = trained(spec, **shape)
    rounded.load_state_dict(
        {n: t.to(dtype) if t.is_floating_point() else t for n, t in draft.state_dict().items()}
    )
    sample, embed = features[1], TargetWeights(spec).embed_tokens().float()
    aux, ids = sample.aux_hidden_states[:20].flatten(1).float(), sample.token_ids[1:24].tolist()
    layer = config.get("transformer_layer_config", config)
    expected = engine_logits(layer, config, state, embed, aux, ids)
    cache = rounded.new_cache(len(ids))
    logits, feedback = rounded.decode_step(rounded.fuse(aux), torch.tensor(ids[:20]), cache)
    for k, wanted in enumerate(expected):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        if k < 3:
            logits, feedback = rounded.decode_step(feedback[None], torch.tensor(ids[20 + k : 21 + k]), cache)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_flipped_flag_changes_the_logits_and_fails_the_proof(tmp_path, spec, draft, features, flag):
    folder = write_folder(tmp_path / "out", "vllm", draft, spec, lambda c: c.update({flag: True}))
    result = check(folder, spec, draft, features)
    assert "logits differ from the trained draft's" in errors(result)
    assert result["proof"]["largest_difference"] > 1e-3


def test_another_rope_base_or_other_layers_fail_the_proof(tmp_path, spec, draft, features):
    def base(config):
        config["transformer_layer_config"]["rope_theta"] = 10000.0
        config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 10000.0

    result = check(write_folder(tmp_path / "a", "vllm", draft, spec, base), spec, draft, features)
    assert "logits differ" in errors(result) and "rope_theta is 10000.0, the target's 50000.0" in warnings(result)
    change = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    folder = write_folder(tmp_path / "b", "vllm", draft, spec, lambda c: c.update(change))
    assert "captures boundaries [1, 4, 6], the draft was trained on [2, 4, 6]" in errors(
        check(folder, spec, draft, features)
    )


def test_a_changed_tensor_fails_the_proof(tmp_path, spec, draft, features):
    tensors = {FC: draft.state_dict()[FC].to(torch.bfloat16) * 1.01}
    folder = write_folder(tmp_path / "out", "vllm", draft, spec, tensors=tensors)
    assert "fc.weight is not the trained tensor rounded to torch.bfloat16" in errors(
        check(folder, spec, draft, features)
    )


def test_too_short_samples_are_said_to_prove_nothing(tmp_path, spec, draft, features):
    result = check(write_folder(tmp_path / "out", "vllm", draft, spec), spec, draft, features[3:])
    assert result["ok"] and "no logits were compared" in warnings(result)


@pytest.mark.parametrize("name", ["fc.weight", Q, "lm_head.weight", "norm.weight", "d2t", "t2d"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_tensor_is_an_error(tmp_path, draft, spec, layout, name):
    result = mutated(
        tmp_path, draft, spec, layout, tensors={name.replace("layers.0.", LAYOUTS[layout].LAYER): None}
    )
    assert not result["ok"] and f"{name} [" in errors(result) and "is missing" in errors(result)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unknown_tensors_are_errors(tmp_path, draft, spec, layout):
    extra = {"verifier_norm.weight": torch.ones(32), "layers.0.self_attn.q_norm.weight": torch.ones(8)}
    found = errors(mutated(tmp_path, draft, spec, layout, tensors=extra))
    assert "q_norm.weight is not part of this draft" in found and "verifier_norm.weight is not part" in found


def test_wrong_shapes_and_types_are_named(tmp_path, draft, spec):
    tensors = {Q: torch.ones(32, 32).bfloat16(), "t2d": draft.t2d[None]}
    found = errors(mutated(tmp_path, draft, spec, tensors=tensors))
    assert f"{Q}: expected [32, 64], found [32, 32]" in found
    assert "t2d: expected [320], found [1, 320]" in found
    found = errors(mutated(tmp_path, draft, spec, tensors={"d2t": draft.d2t.int()}))
    assert "d2t: expected 1-D int64, found int32" in found


def test_what_sglang_cannot_capture_is_an_error(tmp_path, draft, spec):
    target = replace(spec, model_type="deepseek_v3")
    folder = write_folder(tmp_path / "out", "sglang", draft, spec)

    def one(config):
        config["eagle_aux_hidden_state_layer_ids"] = [1, 4, 6]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 3, 5]

    assert check(folder, target)["ok"]
    found = errors(check(write_folder(tmp_path / "out", "sglang", draft, spec, one), target))
    assert "vLLM would capture boundaries [1, 4, 6], SGLang [0, 3, 5]" in found


def test_head_rows_follow_the_draft_vocabulary(tmp_path, draft, spec):
    found = errors(mutated(tmp_path, draft, spec, change=lambda c: c.update(draft_vocab_size=90)))
    assert "lm_head.weight: expected [90, 32], found [100, 32]" in found


def test_tables_of_a_full_vocabulary_are_an_error(tmp_path, spec):
    full = trained(spec, 320)
    result = mutated(tmp_path, full, spec, tensors={"d2t": torch.zeros(320, dtype=torch.int64)})
    assert "d2t is not part of this draft: vLLM refuses it" in errors(result)


def test_absolute_ids_in_d2t_are_told_from_offsets(tmp_path, draft, spec):
    ids = torch.arange(100) + draft.d2t
    result = mutated(tmp_path, draft, spec, tensors={"d2t": ids})
    finding = next(f for f in result["findings"] if f["check"] == "vocabulary")
    assert finding["level"] == "error" and "these are ids, not offsets" in finding["hint"]
    twice = draft.d2t.clone()
    twice[1] -= 1
    assert "decode to target id" in errors(mutated(tmp_path, draft, spec, tensors={"d2t": twice}))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_no_training_leaves_behind(tmp_path, draft, spec, value):
    tensor = draft.state_dict()[Q].clone()
    tensor[3, 4] = value
    found = errors(mutated(tmp_path, draft, spec, tensors={Q: tensor.bfloat16()}))
    assert f"{Q} has 1 values that are NaN or infinite" in found


def test_an_all_zero_head_is_an_error(tmp_path, draft, spec):
    tensors = {"lm_head.weight": torch.zeros(100, 32).bfloat16()}
    assert "lm_head.weight is all zero" in errors(mutated(tmp_path, draft, spec, tensors=tensors))


def test_an_embedding_in_the_folder_must_be_the_targets(tmp_path, draft, spec):
    own = {"embed_tokens.weight": draft.embed_tokens.bfloat16()}
    assert mutated(tmp_path, draft, spec, tensors=own)["ok"]
    other = {"embed_tokens.weight": torch.ones_like(own["embed_tokens.weight"])}
    assert "embed_tokens.weight is not the target's" in errors(mutated(tmp_path, draft, spec, tensors=other))


def test_weights_of_another_type_are_named(tmp_path, draft, spec):
    integers = {"fc.weight": torch.ones(32, 96, dtype=torch.int32)}
    assert "weights are ['torch.bfloat16', 'torch.int32']" in errors(
        mutated(tmp_path, draft, spec, tensors=integers)
    )
    said = mutated(tmp_path, draft, spec, change=lambda c: c.update(dtype="float16"))
    assert "config.json says float16, the weights are torch.bfloat16" in warnings(said)


def drop(*path):
    def change(config):
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


LAYER = "transformer_layer_config"


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("vllm", drop(LAYER), "transformer_layer_config lacks hidden_size"),
        ("vllm", drop(LAYER, "max_position_embeddings"), "lacks max_position_embeddings"),
        ("vllm", drop(LAYER, "num_aux_hidden_states"), None),
        ("vllm", drop("speculators_config", "verifier"), "verifier.name_or_path"),
        ("vllm", drop("speculators_config", "proposal_methods"), "speculative_tokens is no number above 0"),
        ("vllm", drop("speculators_model_type"), "speculators_model_type is not eagle3"),
        (
            "vllm",
            lambda c: (drop(LAYER, "rope_theta")(c), drop(LAYER, "rope_parameters")(c)),
            "rope_theta is missing",
        ),
        ("vllm", lambda c: c[LAYER].update(rope_theta=10000.0), r"rope_theta is [10000.0, 50000.0]"),
        ("vllm", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[4, 2, 6]), "aux_layers must be distinct"),
        ("vllm", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), "exceed the target's 8 layers"),
        ("vllm", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4]), "gives fc 3 inputs"),
        ("vllm", lambda c: c[LAYER].update(vocab_size=300), "vocab_size is 300, the target's 320"),
        ("vllm", lambda c: c[LAYER].update(tie_word_embeddings=True), "tie_word_embeddings is true"),
        ("vllm", lambda c: c[LAYER].update(num_hidden_layers=5), "num_hidden_layers is not 1"),
        ("vllm", lambda c: c[LAYER].update(rms_norm_eps=-3), "rms_norm_eps must be above 0, found -3"),
        ("vllm", lambda c: c[LAYER].update(attention_bias=True), "attention_bias is true"),
        ("vllm", lambda c: c[LAYER].update(hidden_size="abc"), "a type that no engine reads"),
        (
            "vllm",
            lambda c: c["speculators_config"].update(proposal_methods=[{"speculative_tokens": -5}]),
            "above 0",
        ),
        ("sglang", drop("draft_vocab_size"), "draft_vocab_size is missing"),
        ("sglang", lambda c: c.update(target_hidden_size=None), "target_hidden_size is null"),
        ("sglang", lambda c: c.update(norm_before_residual=True), "norm_before_residual is true"),
        ("sglang", lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "fc would not be used"),
        (
            "sglang",
            lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 6]),
            "vLLM would capture boundaries [2, 4, 6], SGLang [3, 5, 7]",
        ),
    ],
)
def test_config_faults(tmp_path, draft, spec, layout, change, message):
    result = mutated(tmp_path, draft, spec, layout, change)
    assert result["ok"] if message is None else message in errors(result), result["findings"]


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("vllm", drop("norm_before_residual"), "norm_before_residual is not written: true to vLLM"),
        ("vllm", drop(LAYER, "head_dim"), "head_dim is not written; engines divide and get 8"),
        ("vllm", drop(LAYER, "rope_theta"), "newer spelling only"),
        ("sglang", drop("rope_parameters"), "older spelling only"),
        (
            "sglang",
            lambda c: c.update(max_position_embeddings=64),
            "max_position_embeddings is 64, the target's 256",
        ),
    ],
)
def test_config_doubts(tmp_path, draft, spec, layout, change, message):
    assert message in warnings(mutated(tmp_path, draft, spec, layout, change))


def test_an_authors_checkpoint_is_read_from_a_pickle_of_weights_only(tmp_path, draft, spec):
    def authors(config):
        for key in (
            "eagle_config",
            "eagle_aux_hidden_state_layer_ids",
            "rope_parameters",
            "num_aux_hidden_states",
        ):
            del config[key]
        config["architectures"] = ["LlamaForCausalLM"]

    folder = write_folder(tmp_path / "raw", "sglang", draft, spec, authors)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    result = check(folder)
    assert result["ok"] and result["format"] == "raw", result["findings"]
    assert "SGLang wants LlamaForCausalLMEagle3" in warnings(result)
    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")
    assert "cannot be read" in errors(check(folder))


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


def test_folders_that_are_no_draft(tmp_path, spec, draft):
    assert "is of no EAGLE-3 layout known here (architectures ['LlamaForCausalLM'])" in errors(verify(spec.path))
    (tmp_path / "empty").mkdir()
    assert "config.json cannot be read" in errors(verify(tmp_path / "empty"))
    folder = write_folder(tmp_path / "cut", "vllm", draft, spec)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert f"({len(whole) - 100} bytes) cannot be read" in errors(verify(folder))
    (folder / "model.safetensors").unlink()
    assert "has neither *.safetensors nor pytorch_model.bin" in errors(verify(folder))
    for path in ("https://host/draft", "org/draft", tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="is not a folder"):
            verify(path)


def test_the_folders_name_decides_nothing(tmp_path, draft, spec):
    folder = write_folder(tmp_path / "out", "sglang", draft, spec)
    shutil.move(folder, tmp_path / "my-mtp-eagle3-test")
    assert verify(tmp_path / "my-mtp-eagle3-test", target=str(spec.path))["format"] == "sglang"
