"""A finished run's folder, written by hand: every file the page reads, as the stages write them, but small."""

import json
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.files import write_json, write_text

PROMPT = "Is <script>window.broken = 1</script> safe & sound?"
PIECES = [
    "No",
    ",",
    " never",
    " trust",
    " <script>",
    "alert(1)",
    "</script>",
    ".",
    "\n",
    "Escape",
    " it",
    ".",
    "<|im_end|>",
]


def _set(tau: float, rates: list[float], categories: dict[str, float], prompts: int) -> dict:
    part = {"tau": tau, "accept_rate_by_position": rates, "prompts": prompts, "identical": prompts, "ties": 0}
    part |= {"different": 0, "tokens": 5210, "rounds": int(5210 / tau), "not_available": {}}
    part |= {"baseline_tok_s": 31.4, "speculative_tok_s": 39.9, "speedup": 1.27, "timed": 8}
    inner = {c: part | {"tau": t, "prompts": 8} for c, t in categories.items()}
    return part | {"by_category": inner}


def make_run(folder: Path) -> Path:
    config = RunConfig.parse({"target": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct"}, "run_dir": str(folder)})
    write_text(folder / "run.yaml", config.to_yaml())
    versions = {"python": "3.11.2", "eyas": "0.1.0", "torch": "2.11.0", "transformers": "5.2.0"}
    hardware = {"machine": "x86_64", "cpus": 2, "threads": 2, "gpus": []}
    write_json(folder / "run.json", {"versions": versions, "git": "4f1c2a9e", "seed": 0, "hardware": hardware})

    example = [("<|im_start|>", 0), ("user", 0), ("\n", 0), (PROMPT, 0), ("<|im_end|>", 0), ("\n", 0)]
    example += [("<|im_start|>", 0), ("assistant", 0), ("\n", 0), *((p, 1) for p in PIECES), ("\n", 0)]
    counts = {"rows": 612, "samples": 608, "train": 568, "heldout": 40, "quarantined": 4, "tokens": 171_200}
    prepare = {
        "counts": counts | {"supervised": 84_310, "truncated": 0},
        "reasons": {"turn 2 has neither content nor tool_calls": 3, "no turns": 1},
        "examples": [[[t, bool(s)] for t, s in example]] * 2,
        "warnings": [],
        "seconds": 3.4,
    }
    vocab = {"counts": {"size": 8192, "pinned": 17}, "coverage": 0.9914, "seconds": 0.3}
    kinds = {"cooking": 1.71, "travel": 1.6, "<b>code</b>": 1.83, "letters": 1.42}
    heldout = _set(1.62, [0.44, 0.31, 0.29], kinds, 40)
    mt_bench = _set(1.31, [0.27, 0.2, 0.15], {"writing": 1.2, "math": 1.55, "coding": 1.4}, 80)
    sets = {"heldout": heldout, "mt_bench": mt_bench}
    evaluate = heldout | {"sets": sets, "ok": True, "definitions": {"tau": "tokens / rounds"}, "warnings": []}
    outputs = [
        {"id": f"{s}{i}", "set": s, "category": c, "prompt": PROMPT, "pieces": PIECES * 4, "rounds": [3, 0, 1] * 8}
        for s, c in (("heldout", "cooking"), ("mt_bench", "writing"))
        for i in range(4)
    ]
    outputs = [o | {"identical": True, "verdict": "identical"} for o in outputs]
    finding = {
        "check": "head",
        "level": "warning",
        "message": "top-1 agreement is 61 %",
        "hint": "look at <samples>",
        "evidence": {},
    }
    stages = [
        {
            "name": "features",
            "status": "passed",
            "seconds": 0.4,
            "findings": [
                finding
                | {
                    "check": "finite",
                    "level": "info",
                    "message": "8 samples, 2,105 tokens: all finite",
                    "hint": "",
                }
            ],
        }
    ]
    stages += [{"name": "alignment", "status": "warned", "seconds": 1.2, "findings": [finding]}]
    verify = {
        layout: {
            "ok": True,
            "format": layout,
            "findings": [{"level": "info", "message": "17 tensors, logits equal"}],
        }
        for layout in ("vllm", "sglang")
    }
    results = {
        "prepare": prepare,
        "extract": {
            "counts": {"samples": 608, "tokens": 171_200, "shards": 2, "bytes": 690_400_128},
            "seconds": 148.2,
        },
        "vocab": vocab,
        "train": {"counts": {"steps": 240, "tokens": 513_600, "parameters": 12_345_678}, "seconds": 301.7},
        "evaluate": evaluate | {"counts": {"prompts": 120}, "seconds": 122.9},
        "export": {"counts": {"layouts": 2}, "verify": verify, "seconds": 4.0},
        "preflight": {"ok": True, "seconds": 6.1, "stages": stages},
    }
    for name, result in results.items():
        write_json(folder / name / "result.json", result)
        if name != "preflight":
            manifest = {
                "stage": name,
                "status": "complete",
                "fingerprint": "ab" * 32,
                "digest": "cd" * 32,
                "inputs": {"target": "ef"},
            }
            write_json(folder / name / "manifest.json", manifest)
    write_text(folder / "evaluate" / "outputs.jsonl", "".join(json.dumps(o) + "\n" for o in outputs))
    rows = [
        {"step": s, "train": {"loss": 2 + 6 / (1 + s / 30), "lr": 1e-3 * min(1, s / 10), "tok_s": 1800.0}}
        for s in range(1, 241)
    ]
    for s in range(60, 241, 60):
        accuracy = [0.2 + s / 1200, 0.12 + s / 1500, 0.1 + s / 2000]
        rows.append(
            {
                "step": s,
                "eval": {"loss": 2.2 + 6 / (1 + s / 30), "tau": 1 + s / 400, "accuracy_by_position": accuracy},
            }
        )
    write_text(folder / "train" / "logs" / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "demo-run")
