import json
from dataclasses import replace

import pytest

from eyas.config import DraftConfig
from eyas.draft import DraftShapeError, Eagle3DraftConfig
from eyas.draft.layers import Rope

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture
def config(target):
    return Eagle3DraftConfig.from_target(target[0], DraftConfig(), [1, 3, 5], 64)


def test_the_draft_follows_the_target_where_the_run_says_nothing(target):
    spec = target[0]
    config = Eagle3DraftConfig.from_target(spec, DraftConfig(intermediate_size=48, fc_norm=True), [2, 5], 64)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (32, 4, 8)
    assert (config.intermediate_size, config.fc_norm, config.norm_output) == (48, True, False)
    assert config.rope_parameters == spec.rope_parameters
    assert config.aux_layers == (2, 5) and config.num_aux == 2  # the real boundaries, not their places
    assert config.pruned and not replace(config, draft_vocab_size=320).pruned
    assert Eagle3DraftConfig.from_target(spec, DraftConfig(), [2], 10**6).draft_vocab_size == 320


def test_survives_json(config):
    assert Eagle3DraftConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_and_missing_keys_are_named(config):
    value = config.to_dict()
    value["fc_bias"] = value.pop("fc_norm")
    with pytest.raises(DraftShapeError, match=r"unknown keys \['fc_bias'\], missing keys \['fc_norm'\]"):
        Eagle3DraftConfig.from_dict(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 64 differs from the target's 32.*cannot be shared"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"draft_vocab_size": 321}, "321 exceeds the target's vocab_size 320"),
        ({"aux_layers": [2, 2, 3]}, r"distinct and ascending, found \[2, 2, 3\]"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"hidden_act": "gelu"}, "silu only"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type be one of default"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta must be given"),
    ],
)
def test_contradictions_are_refused(config, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        replace(config, **change)
    assert isinstance(caught.value, DraftShapeError)


def test_rotary_scaling_changes_the_frequencies(config):
    plain = Rope(replace(config, rope_parameters=ROPE)).frequencies
    linear = Rope(replace(config, rope_parameters=ROPE | {"rope_type": "linear", "factor": 2.0})).frequencies
    assert plain.tolist() == pytest.approx([10000 ** (-i / 4) for i in range(4)])
    assert (linear * 2).tolist() == pytest.approx(plain.tolist())


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_rotary_scaling_equals_that_of_transformers(config, scaling):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = ROPE | scaling
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope)
    )
    cos, sin = Rope(replace(config, rope_parameters=rope)).table(300, torch.zeros(1))
    expected = theirs(torch.zeros(1), torch.arange(300)[None])
    cos, sin = cos[:300], sin[:300]
    torch.testing.assert_close(torch.cat([cos, cos], -1), expected[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([sin, sin], -1), expected[1][0], rtol=1e-4, atol=1e-4)


def test_a_rotary_factor_that_contradicts_the_lengths_is_kept_and_shown(target, capsys):
    rope = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    spec = replace(target[0], rope_parameters=rope, max_position_embeddings=8192)
    config = Eagle3DraftConfig.from_target(spec, DraftConfig(), [1], 64)
    assert config.rope_parameters["factor"] == 4.0
    assert "factor 4 is kept" in (text := capsys.readouterr().err) and "is 8" in text
