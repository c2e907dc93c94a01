import json
import shutil
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.data import regenerate
from eyas.data.conversation import parse
from eyas.errors import EyasError
from eyas.pipeline import Context
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from tests.tiny import make_target

USER, ASSISTANT = "user", "assistant"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    # one id in eleven ends an answer, so that some stop early
    return make_target(tmp_path_factory.mktemp("target"), layers=2, eos_token_id=list(range(0, 320, 11)))


def talk(id: str, *contents: str | None, **more) -> dict:
    """A conversation in which user and assistant take turns."""
    turns = [{"role": (USER, ASSISTANT)[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"id": id, "category": "c", "messages": turns} | more


ROWS = [
    talk("one", "the sun rises"),
    talk("two", "over a quiet river", "old answer", "and small birds sing"),
    talk("three", "to every child", "kept answer"),
    talk("four", "the sun rises"),
    talk("five", "who walks along its green banks and the sun rises over a quiet river"),
]


def context(folder: Path, target: Path, rows: list, **choice) -> Context:
    out = folder / "regenerate.partial"
    (out / "logs").mkdir(parents=True, exist_ok=True)
    source = folder / "rows.jsonl"
    source.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    settings = {"mode": "missing", "max_new_tokens": 12, "batch_size": 2} | choice
    raw = {"target": {"model": str(target)}, "data": {"sources": [str(source)]}, "regenerate": settings}
    return Context(RunConfig.parse(raw), folder, out)


def lines(ctx: Context, name: str = "conversations.jsonl") -> list[dict]:
    return [json.loads(line) for line in (ctx.out / name).read_text().splitlines()]


def digest(ctx: Context) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in ctx.out.iterdir() if p.is_file()}


def greedy(target: Path, messages: list[dict], tokens: int) -> list[int]:
    """The library's own answer to a history."""
    import torch

    loaded = Target.load(TargetSpec.load(target))
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    given = torch.tensor([ids])
    out = loaded.model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=loaded.spec.eos_token_ids,
    )
    return out[0, len(ids) :].tolist()


def test_missing_answers_are_the_target_s_own(tmp_path, target):
    ctx = context(tmp_path, target, ROWS)
    result = regenerate.run(ctx)
    made = {line["id"]: line for line in lines(ctx)}
    assert result["counts"]["rows"] == 5 == result["counts"]["conversations"] + result["counts"]["quarantined"]
    assert len(made) >= 4 and {line["finish"] for line in made.values()} == {"stop", "length", None}
    eos = TargetSpec.load(target).eos_token_ids
    for row in ROWS:
        if row["id"] == "three" or row["id"] not in made:
            continue
        line = made[row["id"]]
        assert line["messages"][:-1] == row["messages"] and line["category"] == "c"
        [answer] = line["answers"]
        assert answer["token_ids"] == greedy(target, row["messages"], 12)
        assert answer["turn"] == len(row["messages"])
        assert answer["finish"] == ("stop" if answer["token_ids"][-1] in eos else "length") == line["finish"]
        assert line["messages"][-1]["content"].strip()
    assert made["three"]["messages"] == ROWS[2]["messages"] and made["three"]["answers"] == []
    assert [r["source"]["row"] for r in made.values()] == sorted(r["source"]["row"] for r in made.values())


def test_the_lines_are_conversations_that_the_reader_takes_back(tmp_path, target):
    ctx = context(tmp_path, target, ROWS)
    regenerate.run(ctx)
    for line in lines(ctx):
        back = parse(line)
        assert (back.id, back.messages) == (line["id"], line["messages"])
        assert {i: a.token_ids for i, a in back.answers.items()} == {
            a["turn"]: a["token_ids"] for a in line["answers"]
        }


def test_all_answers_every_assistant_turn_upon_the_regenerated_history(tmp_path, target):
    ctx = context(tmp_path, target, [talk("x", "the sun", "old", "a river", "old too", "birds")], mode="all")
    regenerate.run(ctx)
    [line] = lines(ctx)
    assert [a["turn"] for a in line["answers"]] == [1, 3, 5]
    for answer in line["answers"]:
        history = line["messages"][: answer["turn"]]
        assert answer["token_ids"] == greedy(target, history, 12)
    assert [m["content"] for m in line["messages"][::2]] == ["the sun", "a river", "birds"]


def test_tool_calls_and_an_assistant_s_opening_are_kept(tmp_path, target):
    call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "the time"},
        {"role": "assistant", "content": "one moment", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]
    ctx = context(tmp_path, target, [{"id": "t", "messages": messages, "tools": [call]}], mode="all")
    regenerate.run(ctx)
    [line] = lines(ctx)
    assert line["messages"][:4] == messages and line["tools"] == [call]
    assert [a["turn"] for a in line["answers"]] == [4]


def test_equal_prompts_are_answered_once_and_alike(tmp_path, target):
    ctx = context(tmp_path, target, [talk(str(i), "the sun rises") for i in range(5)], temperature=1.0)
    assert regenerate.run(ctx)["counts"]["answers"] == 5
    assert len({json.dumps(line["messages"]) for line in lines(ctx)}) == 1
    journal = [json.loads(line) for line in (ctx.out / "logs/batches.jsonl").read_text().split("\n") if line]
    assert sum(len(answers) for entry in journal for answers in entry.values()) == 1


def test_bad_rows_are_set_aside_with_file_row_and_reason(tmp_path, target):
    rows = [
        "{broken\n",
        talk("long", "sun " * 300),
        talk("ok", "the sun rises"),
        {"messages": []},
        talk("odd", "a") | {"messages": [{"role": "narrator", "content": "b"}]},
    ]
    ctx = context(tmp_path, target, rows)
    counts = regenerate.run(ctx)["counts"]
    bad = lines(ctx, "quarantine.jsonl")
    assert [b["row"] for b in bad] == [1, 2, 4, 5] and all(b["file"].endswith("rows.jsonl") for b in bad)
    reasons = [b["reason"] for b in bad]
    assert "JSON" in reasons[0] and "no room in the target's window of 256" in reasons[1]
    assert "no turns" in reasons[2] and "narrator" in reasons[3]
    assert (counts["rows"], counts["conversations"], counts["quarantined"]) == (5, 1, 4)


def test_an_empty_answer_is_set_aside(tmp_path, target):
    always = tmp_path / "always"
    shutil.copytree(target, always)
    (always / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(320))}))
    ctx = context(tmp_path, always, ROWS[:1])
    with pytest.raises(EyasError, match="no conversation is left to answer: 1 rows set aside"):
        regenerate.run(ctx)
    assert lines(ctx) == []
    assert lines(ctx, "quarantine.jsonl")[0]["reason"] == "the target's answer, turn 2, is empty"


def test_limit_counts_good_rows(tmp_path, target):
    ctx = context(tmp_path, target, ["{broken\n", *ROWS])
    limited = ctx.config.model_copy(update={"data": ctx.config.data.model_copy(update={"limit": 2})})
    assert regenerate.run(Context(limited, ctx.run_dir, ctx.out))["counts"]["rows"] == 3


def test_a_killed_run_goes_on_from_its_last_batch_to_the_same_bytes(tmp_path, target, monkeypatch):
    rows = [talk(str(i), f"the sun rises over {i}", "x", f"and sets at {i}") for i in range(7)]
    whole = context(tmp_path / "whole", target, rows, mode="all")
    regenerate.run(whole)
    # the file name is part of the lines: both runs read the same one
    sources = whole.config.data.sources
    ctx = context(tmp_path / "killed", target, rows, mode="all")
    data = ctx.config.data.model_copy(update={"sources": sources})
    ctx = Context(ctx.config.model_copy(update={"data": data}), ctx.run_dir, ctx.out)
    made, plain = [], regenerate.generate

    def dies(target, batch, *rest):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(batch)
        return plain(target, batch, *rest)

    monkeypatch.setattr(regenerate, "generate", dies)
    with pytest.raises(KeyboardInterrupt):
        regenerate.run(ctx)
    assert not (ctx.out / "conversations.jsonl").exists()
    journal = ctx.out / "logs" / "batches.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])  # torn in the middle of the fifth batch
    again = []
    monkeypatch.setattr(
        regenerate, "generate", lambda t, batch, *rest: again.append(batch) or plain(t, batch, *rest)
    )
    regenerate.run(ctx)
    assert again[0] == made[4] and len(again) == 4  # 7 prompts in batches of 2, twice: 8 batches, 4 of them kept
    assert digest(ctx) == digest(whole)
    monkeypatch.setattr(regenerate, "generate", lambda *_: pytest.fail("all is written down"))
    regenerate.run(ctx)
    assert digest(ctx) == digest(whole)


def test_nothing_to_answer_is_said(tmp_path, target, capsys):
    ctx = context(tmp_path, target, [ROWS[2]])
    assert regenerate.run(ctx)["warnings"]
    assert "no conversation has a turn" in capsys.readouterr().err
    assert lines(ctx)[0]["messages"] == ROWS[2]["messages"]


def test_a_target_that_names_no_eos_is_refused(tmp_path, target):
    endless = tmp_path / "endless"
    shutil.copytree(target, endless)
    for name in ("config.json", "generation_config.json"):
        value = json.loads((endless / name).read_text())
        value.pop("eos_token_id", None)
        (endless / name).write_text(json.dumps(value))
    with pytest.raises(EyasError, match="no eos_token_id"):
        regenerate.run(context(tmp_path, endless, ROWS[:1]))
