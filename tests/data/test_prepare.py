"""The stage on a tiny real target, and on the demo's: every row accounted for, the split, cuts, caches."""

import json
import shutil
import time

import pytest

from eyas.config import RunConfig
from eyas.data.prepare import run
from eyas.data.samples import read_metadata, read_samples
from eyas.errors import EyasError
from eyas.pipeline import BY_NAME, Context, fingerprint
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer
from tests.tiny import CHATML, make_conversations, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"), layers=2)


def talk(question, answer="the sun rises", **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def context(folder, target, rows, regenerate=None, **data) -> Context:
    folder.mkdir(exist_ok=True)
    source = folder / "data.jsonl"
    source.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    raw = {"target": {"model": str(target)}, "data": {"sources": [str(source)], "heldout": 0.0} | data}
    if regenerate:
        raw["regenerate"] = {"mode": regenerate}
    return Context(RunConfig.parse(raw), folder, folder / "prepare")


def quarantine(ctx):
    return [json.loads(line) for line in (ctx.out / "quarantine.jsonl").read_text().splitlines()]


def prepared(ctx):
    return read_samples(ctx.out / "samples.parquet")


def test_every_row_is_a_conversation_set_aside_with_its_number_or_a_duplicate(tmp_path, target):
    share = {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "the sun rises"}]}
    rows = [
        talk("one"),
        "{broken",
        {"conversations": []},
        share,  # says the same as row 1
        talk("two", "why</think>so"),
        {"messages": [{"role": "user", "content": "no answer"}]},
        talk("three", "it ends <|im_end|> here"),
    ]
    ctx = context(tmp_path, target, rows)
    result = run(ctx)
    counts = result["counts"]
    assert counts["rows"] == 7 == counts["conversations"] + counts["quarantined"] + counts["duplicates"]
    assert (counts["conversations"], counts["quarantined"], counts["duplicates"]) == (2, 4, 1)
    assert counts["think_tag_restored"] == 1
    aside = quarantine(ctx)
    assert [a["row"] for a in aside] == [2, 3, 6, 7]
    assert all(a["file"].endswith("data.jsonl") for a in aside)
    assert [a["reason"] for a in aside[1:3]] == ["no turns", "no assistant turn"]
    assert sum(result["reasons"].values()) == 4
    assert any("4 of 7 rows are set aside" in w for w in result["warnings"])
    assert [(s.row, s.split) for s in prepared(ctx)] == [(1, "train"), (5, "train")]
    json.dumps(result, allow_nan=False)


def test_limit_counts_good_rows_only(tmp_path, target):
    rows = [{"messages": []}, talk("one"), talk("one"), talk("two"), talk("three"), {"messages": []}]
    ctx = context(tmp_path, target, rows, limit=2)
    counts = run(ctx)["counts"]
    assert (counts["rows"], counts["conversations"], counts["quarantined"], counts["duplicates"]) == (4, 2, 1, 1)


def test_the_same_first_user_turn_is_never_on_both_sides(tmp_path, target):
    rows = [
        talk(q, a) for i in range(400) for q, a in ((f"prompt {i}", "the sun"), (f"  PROMPT\n {i}", "a river"))
    ]
    ctx = context(tmp_path, target, rows, heldout=0.3)
    counts = run(ctx)["counts"]
    split = {s.row: s.split for s in prepared(ctx)}
    assert all(split[row] == split[row + 1] for row in range(1, 800, 2))
    assert 0.25 < counts["heldout"] / counts["samples"] < 0.35
    again = context(tmp_path / "reversed", target, rows[::-1], heldout=0.3)
    run(again)
    assert {s.id: s.split for s in prepared(again)} == {s.id: s.split for s in prepared(ctx)}


def test_long_samples_are_cut_and_those_without_a_supervised_token_left_are_set_aside(tmp_path, target):
    rows = [talk("one", "the sun rises over a quiet river " * 4), talk("the river " * 40)]
    ctx = context(tmp_path, target, rows, max_length=32)
    counts = run(ctx)["counts"]
    (sample,) = prepared(ctx)
    assert len(sample.token_ids) == 32
    assert (counts["truncated"], counts["quarantined"], counts["tokens"]) == (1, 1, 32)
    assert quarantine(ctx)[0]["reason"] == "no supervised token within data.max_length (32)"
    longer = context(tmp_path / "longer", target, rows, max_length=300)
    assert run(longer)["counts"]["truncated"] == 0
    keys = [fingerprint(BY_NAME["prepare"], c.config, c.run_dir)[0] for c in (ctx, longer)]
    assert keys[0] != keys[1]


def test_nothing_to_train_on_is_an_error_that_says_why(tmp_path, target):
    ctx = context(tmp_path, target, [{"messages": [{"role": "user", "content": "hi"}]}] * 3)
    with pytest.raises(
        EyasError, match="no training sample with a supervised token: 3 rows, 3 of them set aside"
    ) as e:
        run(ctx)
    assert "3 × no assistant turn" in str(e.value)


def test_a_high_share_of_supervised_tokens_is_a_warning(tmp_path, target):
    result = run(context(tmp_path, target, [talk("a", "the sun rises over a quiet river " * 60)]))
    assert any("of the tokens are supervised" in w for w in result["warnings"])
    assert run(context(tmp_path, target, [talk("a", "the sun")]))["warnings"] == []


@pytest.mark.parametrize(
    ("begins", "warned"), [("{{ bos_token }}", False), ("{{ bos_token }}{{ bos_token }}", True)]
)
def test_two_begin_tokens_are_a_warning(tmp_path, target, begins, warned):
    changed = shutil.copytree(target, tmp_path / "target")
    (changed / "chat_template.jinja").write_text(begins + CHATML.replace("<|im_start|>", "# "))
    ctx = context(tmp_path, changed, [talk("one")])
    result = run(ctx)
    begin = load_tokenizer(TargetSpec.load(str(changed))).bos_token_id
    assert prepared(ctx)[0].token_ids.tolist().count(begin) == 1 + warned
    assert any("two begin tokens" in w for w in result["warnings"]) == warned


def test_prompt_ids_are_the_first_user_turn_as_a_server_gets_it(tmp_path, target):
    row = talk("one")
    row["messages"] += talk("two")["messages"]
    ctx = context(tmp_path, target, [row])
    run(ctx)
    (sample,) = prepared(ctx)
    tokenizer = load_tokenizer(TargetSpec.load(str(target)))
    assert sample.prompt_ids.tolist() == tokenizer.apply_chat_template(
        row["messages"][:1], add_generation_prompt=True, return_dict=False
    )
    assert sample.token_ids.tolist()[: len(sample.prompt_ids)] == sample.prompt_ids.tolist()


def test_last_turn_only_is_recorded_and_is_another_cache(tmp_path, target):
    row = talk("one")
    row["messages"] += talk("two", "a quiet river")["messages"]
    every, last = (context(tmp_path / s, target, [row], supervise=s) for s in ("all_turns", "last_turn"))
    assert run(last)["counts"]["supervised"] < run(every)["counts"]["supervised"]
    assert read_metadata(last.out / "samples.parquet")["supervise"] == "last_turn"
    assert fingerprint(BY_NAME["prepare"], every.config, tmp_path) != fingerprint(
        BY_NAME["prepare"], last.config, tmp_path
    )


def test_one_changed_character_of_the_template_makes_another_cache_and_old_samples_are_refused(tmp_path, target):
    ctx = context(tmp_path, target, [talk("one")])
    run(ctx)
    changed = shutil.copytree(target, tmp_path / "changed")
    (changed / "chat_template.jinja").write_text(CHATML.replace("\n{{ m", " {{ m"))
    old, new = (TargetSpec.load(str(f)) for f in (target, changed))
    with pytest.raises(EyasError, match="was prepared for") as e:
        read_samples(ctx.out / "samples.parquet", target=new)
    assert all(part in str(e.value) for part in (old.fingerprint[:12], new.fingerprint[:12], old.name, new.name))
    read_samples(ctx.out / "samples.parquet", target=old)
    other = context(tmp_path / "other", changed, [talk("one")])
    assert fingerprint(BY_NAME["prepare"], other.config, tmp_path)[1]["target"] == new.fingerprint


def test_the_same_rows_give_the_same_bytes(tmp_path, target):
    rows = [json.loads(line) for line in make_conversations(tmp_path / "c.jsonl", 300).read_text().splitlines()]
    ctx = context(tmp_path / "run", target, rows, heldout=0.2)
    run(ctx)
    first = (ctx.out / "samples.parquet").read_bytes()
    shutil.rmtree(ctx.out)
    run(ctx)
    assert (ctx.out / "samples.parquet").read_bytes() == first
    assert {s.category for s in prepared(ctx)} == {"a", "b"}


def test_rows_that_share_an_id_become_samples_with_ids_of_their_own(tmp_path, target):
    ctx = context(tmp_path, target, [talk("one", id="x"), talk("two", id="x"), talk("three", id=3)])
    run(ctx)
    ids = [s.id for s in prepared(ctx)]
    assert ids[0] == "x"
    assert ids[1].startswith("x-")
    assert ids[2] == "3"


def test_answers_of_the_target_are_taken_from_regenerate_as_ids(tmp_path, target):
    ctx = context(tmp_path, target, [talk("not this one")], regenerate="all")
    made = tmp_path / "regenerate"
    made.mkdir()
    answer = {"turn": 1, "token_ids": [7, 8, 9, 2], "finish": "stop"}
    (made / "conversations.jsonl").write_text(json.dumps(talk("one", "%&'", answers=[answer])) + "\n")
    with pytest.raises(EyasError, match="stage regenerate"):
        run(ctx)
    (made / "manifest.json").write_text("{}")
    run(ctx)
    (sample,) = prepared(ctx)
    assert sample.token_ids[sample.loss_mask].tolist() == [7, 8, 9, 2]
    (made / "conversations.jsonl").write_text(json.dumps(talk("one", "xyz", answers=[answer])) + "\n")
    with pytest.raises(EyasError) as error:
        run(ctx)
    assert "the ids of turn N say" in error.value.hint and "xyz" in error.value.hint


def test_examples_show_token_text_and_mask(tmp_path, target):
    result = run(context(tmp_path, target, [talk(str(i)) for i in range(5)]))
    assert len(result["examples"]) == 3
    said = "".join(text for text, supervised in result["examples"][0] if supervised)
    assert said == "the sun rises<|im_end|>"


@pytest.mark.slow
def test_four_thousand_conversations_take_seconds_on_the_demos_target(tmp_path, smollm2):
    rows = [
        talk(f"{i} " + "why does the sun rise over the river? " * 9, "because the earth turns " * 24)
        for i in range(4096)
    ]
    ctx = context(tmp_path, smollm2, rows)
    started = time.process_time()
    assert run(ctx)["counts"]["samples"] == 4096
    assert time.process_time() - started < 20
