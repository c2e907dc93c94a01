"""The evaluate stage on a tiny run: sets, categories, reasons of nulls, and going on after a kill."""

import json
from pathlib import Path

import numpy as np
import pytest

from eyas.config import EvaluateConfig, RunConfig
from eyas.data.samples import Sample, write_samples
from eyas.decode import evaluate
from eyas.decode.evaluate import pieces, summarise
from eyas.decode.prompts import Prompt, file_prompts, heldout_prompts, spread
from eyas.draft import save_draft
from eyas.pipeline import Context
from eyas.target.backend import Target
from tests.decode.conftest import make_draft

MT_BENCH = Path(__file__).parents[2] / "examples" / "demo" / "mt_bench.jsonl"


def make_run(folder, target: Target, kind: str = "target", train: int = 500, **settings) -> Context:
    """A run with prepare and train done: 6 held-out conversations of two kinds, one of them too long."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 320, size=8 + i).astype(np.int32) for i in range(5)]
    prompts += [np.full(256, 5, np.int32), prompts[0]]  # the last: a second sample of the first conversation
    mask = np.array([False, True])
    samples = [
        Sample(f"s{i}", "heldout", "ab"[i % 2], np.array([5, 6], np.int32), mask, prompt)
        for i, prompt in enumerate(prompts)
    ]
    spec = target.spec
    known = {"target": spec.name, "target_fingerprint": spec.fingerprint}
    write_samples(folder / "prepare" / "samples.parquet", samples, known)
    save_draft(make_draft(spec, kind), folder / "train")
    counts = {"samples": train, "supervised": 9000}
    (folder / "train" / "result.json").write_text(json.dumps({"counts": counts}))
    for stage in ("prepare", "train"):
        (folder / stage / "manifest.json").write_text("{}")
    settings = {"max_new_tokens": 10, "draft_tokens": 2} | settings
    config = {"run_dir": str(folder), "target": {"model": str(spec.path)}, "evaluate": settings, "device": "cpu"}
    out = folder / "evaluate.partial"
    (out / "logs").mkdir(parents=True)
    return Context(RunConfig.parse(config), folder, out)


def outputs(ctx: Context) -> list[dict]:
    return [json.loads(line) for line in (ctx.out / "outputs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A prompt file in MT-Bench's form, with a row that is none."""
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    rows = [
        {"question_id": 80 + i, "category": "xyz"[i % 3], "turns": [f"question {i}", "more"]} for i in range(6)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in [*rows, {"question_id": 99, "turns": []}]))
    return path


@pytest.fixture(scope="module")
def evaluated(target, questions, tmp_path_factory):
    ctx = make_run(tmp_path_factory.mktemp("run"), target, prompts=[str(questions)], limit=4)
    return ctx, evaluate.run(ctx)


def test_each_set_and_category_has_its_figures(evaluated):
    _, result = evaluated
    assert list(result["sets"]) == ["heldout", "questions"]
    assert result["ok"] and result["identical"] == result["prompts"] == 5
    assert result["tau"] == result["sets"]["heldout"]["tau"]
    assert {c: f["prompts"] for c, f in result["by_category"].items()} == {"a": 3, "b": 2}
    assert {c: f["prompts"] for c, f in result["sets"]["questions"]["by_category"].items()} == {
        "x": 2,
        "y": 1,
        "z": 1,
    }
    for figures in result["sets"].values():
        assert figures["speedup"] == pytest.approx(figures["speculative_tok_s"] / figures["baseline_tok_s"])
        assert len(figures["accept_rate_by_position"]) == 2
        emitted = figures["tau"] * figures["rounds"]
        assert emitted == pytest.approx(figures["tokens"] - figures["prompts"])
    json.dumps(result, allow_nan=False)


def test_what_was_left_out_is_counted_and_said(evaluated):
    _, result = evaluated
    assert result["counts"]["refused"] == 1 and result["counts"]["bad_rows"] == 1
    warnings = "\n".join(result["warnings"])
    assert "1 prompts fill all 256 positions" in warnings
    assert "questions.jsonl row 7" in warnings
    assert "rounds, below 400: tau is not a stable number" in warnings


def test_outputs_can_be_shaded_by_accepted_tokens(evaluated, target):
    ctx, result = evaluated
    rows = outputs(ctx)
    assert len(rows) == result["counts"]["prompts"] == 9
    for row in rows:
        assert "".join(row["pieces"]) == target.tokenizer.decode(row["token_ids"])
        assert len(row["pieces"]) == len(row["token_ids"])
        assert len(row["token_ids"]) - 1 - sum(a + 1 for a in row["rounds"]) in (0, -1)
    assert rows[5]["prompt"].endswith("question 0<|im_end|>\n<|im_start|>assistant\n")
    assert rows[5]["id"] == "80"


@pytest.mark.parametrize("left", [0, 1, 3.5])
def test_a_killed_run_goes_on_to_the_same_bytes(evaluated, target, questions, tmp_path, left, monkeypatch):
    whole, _ = evaluated
    ctx = make_run(tmp_path, target, prompts=[str(questions)], limit=4)
    lines = (whole.out / "logs" / "decoded.jsonl").read_bytes().splitlines(keepends=True)
    half = lines[int(left)][: int(len(lines[int(left)]) * (left % 1))]
    (ctx.out / "logs" / "decoded.jsonl").write_bytes(b"".join(lines[: int(left)]) + half)
    decoded = []
    original = evaluate.plain_decode
    monkeypatch.setattr(evaluate, "plain_decode", lambda *a: decoded.append(a) or original(*a))
    result = evaluate.run(ctx)
    assert (ctx.out / "outputs.jsonl").read_bytes() == (whole.out / "outputs.jsonl").read_bytes()
    assert len(decoded) - 1 == 9 - int(left)  # one more to warm up
    assert result["counts"]["prompts"] == 9 and result["speedup"] > 0


@pytest.mark.parametrize("left", [0, 3, 6])
def test_batched_plain_answers_are_those_of_single_ones(evaluated, target, questions, tmp_path, left):
    whole, alone = evaluated
    ctx = make_run(tmp_path, target, prompts=[str(questions)], limit=4, timed_prompts=1, batch_size=4)
    lines = (whole.out / "logs" / "decoded.jsonl").read_bytes().splitlines(keepends=True)
    (ctx.out / "logs" / "decoded.jsonl").write_bytes(b"".join(lines[:left]))
    result = evaluate.run(ctx)
    assert (ctx.out / "outputs.jsonl").read_bytes() == (whole.out / "outputs.jsonl").read_bytes()
    assert result["ok"] and result["identical"] == 5 and result["tau"] == alone["tau"]
    if not left:
        assert {name: s["timed"] for name, s in result["sets"].items()} == {"heldout": 1, "questions": 1}
        untimed = [c for s in result["sets"].values() for c in s["by_category"].values() if not c["timed"]]
        reasons = {c["not_available"]["speedup"] for c in untimed}
        assert reasons == {"no prompt was timed (evaluate.timed_prompts)"}


def test_without_prompts_figures_are_null_with_reasons(target, tmp_path):
    result = evaluate.run(make_run(tmp_path, target, heldout_prompts=0))
    assert result["tau"] is None and result["speedup"] is None and result["prompts"] == 0
    assert result["not_available"]["tau"] == result["not_available"]["speedup"] == "no prompt was decoded"
    assert "heldout: no acceptance figures: no prompt was decoded" in result["warnings"]


def test_one_token_answers_have_no_acceptance_but_a_speed(target, tmp_path):
    result = evaluate.run(make_run(tmp_path, target, max_new_tokens=1))
    assert result["tau"] is None and "nothing was drafted" in result["not_available"]["tau"]
    assert result["speedup"] > 0 and result["identical"] == 5


def test_nothing_accepted_and_little_training_are_warned_about(target, tmp_path):
    result = evaluate.run(make_run(tmp_path, target, kind="random", train=5, max_new_tokens=6, heldout_prompts=2))
    assert result["tau"] == 1.0
    warnings = "\n".join(result["warnings"])
    assert "tau is 1.00: nothing accepted, likely misconfigured" in warnings
    assert "trained on 5 samples: a smoke test" in warnings
    assert result["training"] == {"samples": 5, "supervised": 9000}


def test_an_output_that_differs_makes_the_stage_not_ok():
    row = {"set": "heldout", "id": "1", "category": None, "token_ids": [4, 5, 6], "rounds": [1], "plain_tokens": 3}
    row["seconds"] = {"plain": 2.0, "speculative": 1.0}
    rows = [row | {"verdict": verdict} for verdict in ("identical", "tie", "different")]
    result = summarise(rows, 2)
    assert not result["ok"]
    assert (result["identical"], result["ties"], result["different"]) == (1, 1, 1)
    assert result["baseline_tok_s"] == 1.5 and result["speedup"] == 2.0
    assert "heldout: 1 outputs differ from plain decoding beyond rounding" in result["warnings"]
    assert summarise(rows[:2], 2)["ok"]


def test_prompts_are_spread_over_categories():
    prompts = [Prompt("s", f"{c}{i}", c, [1]) for c in "abc" for i in range(5)]
    assert [p.id for p in spread(prompts, 7)] == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"]
    assert len(spread(prompts, 100)) == 15 and spread([], 3) == []


def test_held_out_prompts_are_distinct_and_those_of_the_target(target, tmp_path):
    ctx = make_run(tmp_path, target)
    samples = ctx.run_dir / "prepare" / "samples.parquet"
    found = heldout_prompts(samples, target.spec, 40)
    assert [p.id for p in found] == ["s0", "s1", "s2", "s3", "s4", "s5"]
    assert [p.id for p in heldout_prompts(samples, target.spec, 3)] == ["s0", "s1", "s2"]


def test_prompt_files_of_one_name_are_told_apart(target, tmp_path):
    paths = []
    for name in ("one", "two"):
        path = tmp_path / name / "q.jsonl"
        path.parent.mkdir()
        path.write_text(json.dumps({"messages": [{"role": "user", "content": f"hi {name}"}]}) + "\n")
        paths.append(str(path))
    prompts, bad = file_prompts(EvaluateConfig(prompts=paths), target.tokenizer)
    assert [p.set for p in prompts] == paths and bad == []
    assert target.tokenizer.decode(prompts[0].prompt_ids) == (
        "<|im_start|>user\nhi one<|im_end|>\n<|im_start|>assistant\n"
    )


def test_mt_bench_is_there_whole(target):
    prompts, bad = file_prompts(EvaluateConfig(prompts=[str(MT_BENCH)]), target.tokenizer)
    assert len(prompts) == 80 and bad == [] and len({p.category for p in prompts}) == 8
    assert {p.set for p in prompts} == {"mt_bench"}
    fields = {key for line in MT_BENCH.read_text().splitlines() for key in json.loads(line)}
    assert fields == {"question_id", "category", "turns"} and MT_BENCH.with_suffix(".LICENSE.txt").is_file()


def test_pieces_hold_a_character_of_several_tokens_together(target):
    ids = target.tokenizer("añ🙂b", add_special_tokens=False)["input_ids"]
    found = pieces(target.tokenizer, ids)
    assert "".join(found) == "añ🙂b" and "🙂" in found and "\ufffd" not in "".join(found)
