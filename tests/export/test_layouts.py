"""config.json, tensor names and model cards of the two layouts, and what is refused."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from eyas.errors import EyasError
from eyas.export import sglang, vllm
from eyas.export.export import model_card
from eyas.export.reader import Findings, read_shape
from tests.export.conftest import LAYOUTS, trained

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def test_speculators_config_is_complete(draft, spec):
    config = vllm.config(draft.config, spec, "bfloat16", 5)
    layer = config["transformer_layer_config"]
    assert config["architectures"] == ["Eagle3DraftModel"] and config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == 100 and layer["vocab_size"] == 320
    assert [config[flag] for flag in FLAGS] == [False] * 4
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["default_proposal_method"] == "greedy"
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(spec.path.resolve()), "architectures": ["LlamaForCausalLM"]}
    assert layer["model_type"] == "llama" and layer["num_hidden_layers"] == 1 and layer["head_dim"] == 8
    assert layer["max_position_embeddings"] == spec.max_position_embeddings
    assert layer["num_aux_hidden_states"] == 3


def test_a_hub_target_keeps_its_name(draft, spec):
    config = vllm.config(draft.config, replace(spec, name="org/target"), "bfloat16", 3)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"


def test_sglang_config_is_complete(draft, spec):
    config = sglang.config(draft.config, spec, "bfloat16", 3)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1 and config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == 100 and config["vocab_size"] == 320
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]  # vLLM reads these
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}
    assert config["eagle_config"] == nested  # SGLang reads these, and adds one
    assert "target_hidden_size" not in config and config["rope_scaling"] is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1000000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_rope_reads_the_same_in_both_spellings(draft, spec, layout, rope):
    config = LAYOUTS[layout].config(replace(draft.config, rope_parameters=rope), spec, "bfloat16", 3)
    layer = config.get("transformer_layer_config", config)
    for left_out in ((), ("rope_parameters",), ("rope_theta", "rope_scaling")):
        read = LlamaConfig(**{k: v for k, v in layer.items() if k not in left_out}).rope_parameters
        assert {k: read[k] for k in rope} == rope
    assert layer["rope_theta"] == rope["rope_theta"]
    found = Findings()
    shape = read_shape(config, layout, spec, found)
    assert shape and shape.rope_parameters == rope and not found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_flag_and_size_comes_back(spec, layout):
    for flags in ({"norm_before_fc": True}, {"fc_norm": True, "norm_output": True}, {"head_dim": 16}):
        config = trained(spec, 320, intermediate_size=48, **flags).config
        read = read_shape(LAYOUTS[layout].config(config, spec, "bfloat16", 3), layout, spec, Findings())
        assert read == replace(config, train_lm_head=False)


def test_norm_before_residual_comes_back_from_vllm_and_is_refused_for_sglang(spec):
    config = trained(spec, norm_before_residual=True).config
    read = read_shape(vllm.config(config, spec, "bfloat16", 3), "vllm", spec, Findings())
    assert read and read.norm_before_residual
    with pytest.raises(EyasError, match="SGLang has no norm_before_residual") as e:
        sglang.check(config, spec)
    assert "export.layouts to [vllm]" in e.value.hint


def test_one_aux_layer_is_refused_for_sglang_and_counted_for_vllm(draft, spec):
    config = replace(draft.config, aux_layers=(6,))
    with pytest.raises(EyasError, match="a single aux layer never passes fc"):
        sglang.check(config, spec)
    written = vllm.config(config, spec, "bfloat16", 3)
    assert written["transformer_layer_config"]["num_aux_hidden_states"] == 1


@pytest.mark.parametrize(
    ("model_type", "aux", "written"),
    [
        ("llama", [2, 4, 5], [1, 3, 4]),
        ("deepseek_v3", [2, 30, 58], [1, 29, 57]),
        ("kimi_k2", [3, 30, 58], [3, 30, 58]),
        ("glm4_moe_lite", [4, 20, 40], [4, 20, 40]),
        ("gpt_oss", [2, 12, 61], [1, 11, 60]),
        ("minimax_m3", [2, 30, 57], [1, 29, 56]),
    ],
)
def test_sglang_ids_are_read_back_as_the_same_boundaries(draft, spec, model_type, aux, written):
    target = replace(spec, model_type=model_type, num_layers=61)
    assert sglang.layer_ids(aux, target) == written
    assert sglang.boundaries(written, target) == aux
    sglang.check(replace(draft.config, aux_layers=tuple(aux)), target)


@pytest.mark.parametrize(
    ("model_type", "aux"),
    [("llama", (0, 4)), ("llama", (2, 61)), ("deepseek_v3", (1, 4)), ("deepseek_v3", (0, 4))],
)
def test_boundaries_that_sglang_cannot_name_are_refused(draft, spec, model_type, aux):
    target = replace(spec, model_type=model_type, num_layers=61)
    with pytest.raises(EyasError, match=r"cannot capture boundaries|no block is entered"):
        sglang.check(replace(draft.config, aux_layers=aux), target)


def test_tensor_names_and_shapes_are_those_of_the_speculators_layout(draft):
    assert {n: (list(t.shape), t.dtype) for n, t in draft.state_dict().items()} == {
        "fc.weight": ([32, 96], torch.float32),
        "layers.0.input_layernorm.weight": ([32], torch.float32),
        "layers.0.hidden_norm.weight": ([32], torch.float32),
        "layers.0.self_attn.q_proj.weight": ([32, 64], torch.float32),
        "layers.0.self_attn.k_proj.weight": ([16, 64], torch.float32),
        "layers.0.self_attn.v_proj.weight": ([16, 64], torch.float32),
        "layers.0.self_attn.o_proj.weight": ([32, 32], torch.float32),
        "layers.0.post_attention_layernorm.weight": ([32], torch.float32),
        "layers.0.mlp.gate_proj.weight": ([64, 32], torch.float32),
        "layers.0.mlp.up_proj.weight": ([64, 32], torch.float32),
        "layers.0.mlp.down_proj.weight": ([32, 64], torch.float32),
        "norm.weight": ([32], torch.float32),
        "lm_head.weight": ([100, 32], torch.float32),
        "d2t": ([100], torch.int64),
        "t2d": ([320], torch.bool),
    }
    assert (vllm.LAYER, sglang.LAYER) == ("layers.0.", "midlayer.")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cards_serving_snippet_is_complete_and_its_json_parses(draft, spec, layout):
    card = model_card(layout, draft.config, spec, "runs/x/export/" + layout, 5, {"seed": 3})
    options = json.loads(re.search(r"```json\n(.*?)```", card, re.S).group(1))
    command = re.search(r"```sh\n(.*?)\n```", card, re.S).group(1)
    if layout == "vllm":
        expected = {"method": "eagle3", "model": "runs/x/export/vllm", "num_speculative_tokens": 5}
        assert options == expected
        assert json.loads(re.search(r"--speculative-config '(.*)'", command).group(1)) == expected
    else:
        assert options["speculative_num_steps"] == 5 and options["speculative_num_draft_tokens"] == 6
        assert options["speculative_eagle_topk"] == 1 and options["speculative_algorithm"] == "EAGLE3"
        assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in command
    assert str(spec.name) in command and "seed | 3" in card and spec.fingerprint[:16] in card
