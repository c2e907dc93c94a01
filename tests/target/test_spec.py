import json
from pathlib import Path

import pytest

from eyas.errors import EyasError, UsageError
from eyas.target.spec import TargetSpec, check_aux_layers, default_aux_layers
from tests.target.families import FAMILIES, SHAPE, save_model


@pytest.fixture
def llama(tmp_path) -> Path:
    return save_model(tmp_path / "llama", "llama")


def edit(folder: Path, file: str = "config.json", **changes) -> Path:
    """Set keys of a JSON file; None deletes."""
    path = folder / file
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
    return folder


def nest(folder: Path, sub: str = "text_config") -> Path:
    """Move the decoder's settings under a sub-config, as models of more than text have them."""
    config = json.loads((folder / "config.json").read_text())
    top = {"architectures": ["KimiForConditionalGeneration"], "model_type": "kimi_k25", sub: config}
    (folder / "config.json").write_text(json.dumps(top))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_numbers_are_read(tmp_path, family):
    spec = TargetSpec.load(save_model(tmp_path, family))
    assert (spec.model_type, spec.num_layers, spec.hidden_size, spec.vocab_size) == (family, 4, 32, 96)
    assert (spec.num_attention_heads, spec.intermediate_size) == (4, 48)
    assert spec.num_key_value_heads == (SHAPE | FAMILIES[family])["num_key_value_heads"]
    assert spec.head_dim == {"llama": 8, "mistral": 8, "mixtral": 8, "deepseek_v3": 12}.get(family, 16)
    assert spec.eos_token_ids == [2] and spec.dtype == "float32" and spec.max_position_embeddings == 128
    assert {"rope_type", "rope_theta"} <= spec.rope_parameters.keys()
    assert spec.tie_word_embeddings == (family == "gemma3_text")
    assert spec.hidden_act in ("silu", "gelu_pytorch_tanh")


def test_settings_under_text_config_are_read(tmp_path):
    plain = TargetSpec.load(save_model(tmp_path, "deepseek_v3"))
    nested = TargetSpec.load(nest(tmp_path))
    assert nested.model_type == "deepseek_v3" and nested.architectures == ["KimiForConditionalGeneration"]
    assert (nested.hidden_size, nested.num_layers, nested.head_dim) == (32, 4, 12)
    assert nested.rope_parameters == plain.rope_parameters and nested.tie_word_embeddings is False


def test_a_missing_attribute_is_named_with_its_sub_config(llama):
    with pytest.raises(EyasError, match="`num_attention_heads` is missing under `text_config`"):
        TargetSpec.load(nest(edit(llama, num_attention_heads=None)))


def test_a_missing_attribute_of_a_flat_config_is_named(llama):
    with pytest.raises(EyasError, match="`hidden_size` is missing under the top level"):
        TargetSpec.load(edit(llama, hidden_size=None))


def test_left_out_heads_of_keys_and_width_follow_the_query_heads(llama):
    spec = TargetSpec.load(edit(llama, head_dim=None, num_key_value_heads=None))
    assert (spec.head_dim, spec.num_key_value_heads) == (8, 4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_scaling": {"rope_type": "default", "rope_theta": 1000000}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}},
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
        ),
    ],
)
def test_rotary_settings_of_both_spellings_come_out_alike(llama, given, expected):
    assert TargetSpec.load(edit(llama, **({"rope_parameters": None} | given))).rope_parameters == expected


def test_rotary_settings_by_layer_type_follow_full_attention_and_say_so(llama, capsys):
    maps = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4},
    }
    spec = TargetSpec.load(edit(llama, rope_parameters=maps))
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert "takes those of full_attention" in capsys.readouterr().err
    with pytest.raises(EyasError, match="none for full_attention"):
        TargetSpec.load(edit(llama, rope_parameters={"a": {"rope_theta": 1.0}}))


def test_a_missing_rotary_base_is_never_guessed(llama):
    with pytest.raises(EyasError, match="neither `rope_theta` nor"):
        TargetSpec.load(edit(llama, rope_parameters=None))


def test_layer_norm_targets_are_refused(llama):
    with pytest.raises(EyasError, match="uses LayerNorm"):
        TargetSpec.load(edit(llama, rms_norm_eps=None, layer_norm_eps=1e-5))


def test_generation_config_s_eos_ids_go_first(llama):
    assert TargetSpec.load(edit(llama, "generation_config.json", eos_token_id=[7, 9])).eos_token_ids == [7, 9]
    (llama / "generation_config.json").unlink()
    assert TargetSpec.load(llama).eos_token_ids == [2]


def test_the_fingerprint_sees_template_config_and_weights(llama):
    marks = [TargetSpec.load(llama).fingerprint]
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    marks.append(TargetSpec.load(llama).fingerprint)
    (llama / "chat_template.jinja").write_text("{{ messages }} ")
    marks.append(TargetSpec.load(llama).fingerprint)
    marks.append(TargetSpec.load(edit(llama, rms_norm_eps=1e-5)).fingerprint)
    shard = llama / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x07")
    marks.append(TargetSpec.load(llama).fingerprint)
    assert len(set(marks)) == 5
    assert TargetSpec.load(llama).fingerprint == marks[-1]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        TargetSpec.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"target\.model"):
        TargetSpec.load("")


def test_a_hub_id_out_of_reach_is_an_error_with_its_name(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EyasError, match="some-org/some-model"):
        TargetSpec.load("some-org/some-model")


def test_default_layers_are_boundaries_and_collide_in_small_models():
    assert default_aux_layers(30) == [2, 15, 27] and default_aux_layers(7) == [2, 3, 4]
    for layers in range(1, 7):
        with pytest.raises(UsageError, match="distinct, ascending"):
            default_aux_layers(layers)


def test_boundaries_0_to_L_are_taken_as_given():
    assert check_aux_layers([0, 3, 5], 5) == [0, 3, 5]
    for bad in ([], [3, 2, 1], [1, 1], [0, 6], [-1]):
        with pytest.raises(UsageError):
            check_aux_layers(bad, 5)
