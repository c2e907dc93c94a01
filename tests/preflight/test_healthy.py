"""What is legal passes: no error for other architectures, settings, templates, and files of other tools."""

from pathlib import Path
from typing import Any

import pytest

from eyas.config import RunConfig
from eyas.export.export import write_layout
from eyas.preflight.finding import Subject
from eyas.preflight.runner import STAGES, run_preflight
from tests.preflight.faults import base, setting, store
from tests.preflight.foreign import POST_NORM, WRITERS, write
from tests.preflight.healthy import CHECKED, copy_of, make_healthy
from tests.target.families import FAMILIES
from tests.tiny import CHATML

NO_TURN_END = CHATML.replace("<|im_end|>", "")
SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}" + CHATML
FORGETFUL = CHATML.replace(
    "m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip('\\n'))"
)
OWN = {  # what a family needs besides
    "gpt_oss": {"sections": {"target": {"attention": "eager"}}},
    "deepseek_v3": {"sections": {"extract": {"aux_layers": [2, 4, 5]}}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "norm_before_residual, for vLLM": {"draft": {"norm_before_residual": True}, "export": {"layouts": ["vllm"]}},
    "norm_before_fc": {"draft": {"norm_before_fc": True}},
    "fc_norm": {"draft": {"fc_norm": True}},
    "norm_output": {"draft": {"norm_output": True}},
    "EAGLE-3.1": {"draft": {"fc_norm": True, "norm_output": True}},
    "a trained head": {"draft": {"train_lm_head": True}},
    "random weights": {"draft": {"init": "random"}},
    "other heads": {"draft": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}},
    "a wider MLP": {"draft": {"intermediate_size": 96}},
    "bfloat16 products": {"train": {"dtype": "bfloat16"}},
    "one TTT step": {"train": {"ttt_steps": 1}},
    "noise and weight decay": {"train": {"noise": 0.1, "weight_decay": 0.1}},
    "a few steps": {"train": {"max_steps": 5, "eval_every": 2, "checkpoint_every": 2}},
    "float32 export": {"export": {"dtype": "float32"}},
    "one sample looked at": {"preflight": {"samples": 1}},
}
MADE: dict[str, dict[str, Any]] = {
    "untied": {"shape": {"tie_word_embeddings": False}},
    "linear RoPE": {"shape": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
    "yarn RoPE": {
        "shape": {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 5e4,
            }
        }
    },
    "llama3 RoPE": {
        "shape": {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 5e4,
            }
        }
    },
    "no grouped heads": {"shape": {"num_key_value_heads": 4}},
    "a target in float16": {"sections": {"target": {"dtype": "float16"}}},
    "a target in bfloat16": {"sections": {"target": {"dtype": "bfloat16"}}},
    "the full vocabulary": {"sections": {"vocab": {"size": 320}}},
    "a single aux layer": {"sections": {"extract": {"aux_layers": [3]}, "export": {"layouts": ["vllm"]}}},
    "five aux layers": {"sections": {"extract": {"aux_layers": [1, 2, 3, 4, 5]}}},
    "default aux layers": {"shape": {"num_hidden_layers": 8}, "sections": {"extract": {"aux_layers": None}}},
    "last turns only": {"sections": {"data": {"supervise": "last_turn"}}},
    "nothing held out": {"sections": {"data": {"heldout": 0.0}}},
    "a tiny run": {"sections": {"data": {"limit": 3, "heldout": 0.0}, "train": {"batch_tokens": 64}}},
    "many shards": {"sections": {"extract": {"shard_mb": 1, "batch_tokens": 64}}},
}


def errors(result: dict[str, Any]) -> list[str]:
    return [
        f"{s['name']}: {f['message']}" for s in result["stages"] for f in s["findings"] if f["level"] == "error"
    ]


def passes(subject: Any, **options: Any) -> dict[str, Any]:
    result = run_preflight(subject, **{"stages": CHECKED} | options)
    assert errors(result) == []
    assert result["ok"] and "skipped" not in {s["status"] for s in result["stages"]}
    return result


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_architectures(family, tmp_path):
    passes(make_healthy(tmp_path, family, **OWN.get(family, {}).get("sections", {})))


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_settings(change, healthy, tmp_path):
    passes(setting(**change)(copy_of(healthy, tmp_path / "run")))


@pytest.mark.slow
@pytest.mark.parametrize("options", MADE.values(), ids=MADE)
def test_targets_and_data(options, tmp_path):
    passes(make_healthy(tmp_path, shape=options.get("shape"), **options.get("sections", {})))


@pytest.mark.parametrize("template", [SYSTEM, FORGETFUL, NO_TURN_END], ids=["system", "forgetful", "no turn end"])
def test_templates(template, tmp_path, monkeypatch):
    import tests.tiny

    monkeypatch.setattr(tests.tiny, "CHATML", template)
    config = make_healthy(tmp_path)
    assert (Path(config.target.model) / "chat_template.jinja").read_text() == template
    passes(config)


def test_states_behind_the_norm_that_are_declared_so(healthy, tmp_path):
    from dataclasses import replace

    config = copy_of(healthy, tmp_path / "run")
    norm = Subject(config).weights.final_norm()
    store(lambda f: replace(f, last_hidden_state=norm(f.last_hidden_state)), last_hidden_state="post_final_norm")(
        config
    )
    passes(config, stages=["features", "alignment"])


@pytest.mark.parametrize("named", [True, False], ids=["with its target", "alone"])
@pytest.mark.parametrize("kind", WRITERS)
def test_files_of_other_tools(kind, named, healthy, tmp_path):
    folder = write(tmp_path / "files", healthy, kind)
    result = run_preflight(Subject(features=folder, target=healthy.target.model if named else None))
    assert errors(result) == []
    told = {f["check"]: f["message"] for s in result["stages"] for f in s["findings"]}
    if named:
        after = "post_final_norm" if kind in POST_NORM else "pre_final_norm"
        assert told["recomputed"].startswith("recomputed: the aux states are of boundaries [1, 3, 5]")
        assert told["recomputed"].endswith(f"the last one is {after}") and after in told["norm"]
    else:
        assert told["norm"].startswith("skipped: no target is named")
        assert "RMS" in told["states"]


def test_a_store_alone(healthy):
    folder = Path(healthy.run_dir) / "extract" / "features"
    passes(Subject(features=folder, target=healthy.target.model))
    assert errors(run_preflight(Subject(features=folder / "train"))) == []


@pytest.mark.parametrize("named", [True, False], ids=["with its target", "alone"])
@pytest.mark.parametrize("layout", ["vllm", "sglang"])
def test_drafts(layout, named, healthy, tmp_path):
    subject = Subject(healthy)
    write_layout(tmp_path, layout, subject.trial, subject.spec, "bfloat16", 3)
    passes(Subject(draft=tmp_path, target=healthy.target.model if named else None))


def test_every_stage_runs_in_its_order(healthy):
    assert [s["name"] for s in passes(healthy)["stages"]] == CHECKED
    assert STAGES[2:] == CHECKED and STAGES[:2] == ["environment", "imports"]
    assert CHECKED == ["config", "data", "features", "alignment", "vocab", "model", "dry_run", "deploy"]


def test_nothing_in_a_run_is_written(healthy):
    def tree() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in base(healthy).rglob("*")}

    before = tree()
    passes(healthy)
    assert tree() == before


def test_before_anything_is_made_only_the_config_is_looked_at(healthy, tmp_path):
    config: RunConfig = healthy.model_copy(update={"run_dir": str(tmp_path / "new")})
    result = run_preflight(config, CHECKED)
    assert errors(result) == []
    status = {s["name"]: s["status"] for s in result["stages"]}
    assert status.pop("config") in ("passed", "warned") and set(status.values()) == {"skipped"}
