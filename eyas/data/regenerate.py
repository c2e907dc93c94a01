"""The regenerate stage: the target answers the conversations itself, turn after turn, batch by batch.

Wave k answers the k-th missing turn of every conversation, as its prompt holds the turns before. A wave's distinct
prompts are sorted by length and cut into batches up front; each finished batch is a line of `logs/batches.jsonl`,
from which a killed run goes on to the same bytes.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eyas.config import RunConfig
from eyas.data.conversation import BadRow, Conversation, parse
from eyas.data.read import Row, read_rows
from eyas.data.render import Template
from eyas.errors import EyasError
from eyas.files import sha256_json, write_text
from eyas.pipeline import Context
from eyas.progress import bar, say, warn
from eyas.target.backend import Target
from eyas.target.generate import generate
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer


@dataclass
class _Work:
    """A row on its way: `todo` are the indices of the messages that the target still has to say."""

    row: Row
    conversation: Conversation
    todo: list[int]
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    reason: str | None = None

    def set_aside(self, reason: str) -> None:
        self.reason, self.todo = reason, []


def run(ctx: Context) -> dict[str, Any]:
    """Write `conversations.jsonl` and `quarantine.jsonl`; the result has counts and reasons."""
    config, choice, wanted = ctx.config, ctx.config.regenerate, ctx.config.target
    spec = TargetSpec.load(wanted.model, wanted.revision)
    if not spec.eos_token_ids:
        hint = "add it to generation_config.json"
        raise EyasError(f"{spec.path} names no eos_token_id: no answer would end", hint)
    template, target = Template(load_tokenizer(spec, wanted.trust_remote_code)), None
    works = list(_works(config))
    journal, done = ctx.out / "logs" / "batches.jsonl", {}
    for line in journal.read_text().split("\n") if journal.is_file() else []:
        with suppress(json.JSONDecodeError):  # torn by a kill: its batch is made again
            done |= json.loads(line)
    decoding = (choice.max_new_tokens, choice.temperature, choice.top_p, config.seed)
    total = sum(len(w.todo) for w in works)
    with open(journal, "a", buffering=1) as f, bar("regenerate", total, "turns") as progress:
        while wave := _wave(works, template, spec.max_position_embeddings):
            prompts = sorted(wave, key=lambda p: (-len(p), p))  # longest first: what does not fit fails at once
            for start in range(0, len(prompts), choice.batch_size):
                batch = [list(p) for p in prompts[start : start + choice.batch_size]]
                if (key := sha256_json(batch)) not in done:
                    device, remote = config.torch_device(), wanted.trust_remote_code
                    target = target or Target.load(spec, wanted.dtype, device, wanted.attention, remote)
                    done[key] = generate(target, batch, *decoding)
                    f.write("\n" + json.dumps({key: done[key]}))
                for prompt, ids in zip(batch, done[key], strict=True):
                    for work in wave[tuple(prompt)]:
                        _say(work, ids, template, spec)
                        progress.update()
    good, bad = [w for w in works if w.reason is None], [w for w in works if w.reason is not None]
    lines = [json.dumps(_line(w), ensure_ascii=False) + "\n" for w in good]
    write_text(ctx.out / "conversations.jsonl", "".join(lines))
    lines = [json.dumps({"file": w.row.file, "row": w.row.number, "reason": w.reason}) + "\n" for w in bad]
    write_text(ctx.out / "quarantine.jsonl", "".join(lines))
    if not good:
        found = f"{len(bad)} rows set aside, the first: {bad[0].reason}" if bad else "no rows"
        raise EyasError(
            f"no conversation is left to answer: {found}", "look at data.sources and the chat template"
        )

    answers = [a for w in good for a in w.answers.values()]
    counts = {"rows": len(works), "conversations": len(good), "quarantined": len(bad), "answers": len(answers)}
    counts |= {"tokens": sum(len(a["token_ids"]) for a in answers)}
    counts |= {"cut": sum(a["finish"] == "length" for a in answers)}
    say(f"{len(answers)} answers of {counts['tokens']} tokens; {len(bad)} of {len(works)} rows set aside")
    warnings = [] if answers else ["no conversation has a turn for the target to answer"]
    if counts["cut"] > 0.2 * len(answers):
        warnings.append(f"{counts['cut']} of {len(answers)} answers were cut at regenerate.max_new_tokens")
    for text in warnings:
        warn(text)
    reasons = Counter(w.reason for w in bad)
    return {"counts": counts, "reasons": dict(reasons.most_common(20)), "warnings": warnings}


def _works(config: RunConfig) -> Iterator[_Work]:
    """Every row, with the turns it needs answered, until `data.limit` good ones are there."""
    good = 0
    for row in read_rows(config.data.sources):
        if good == config.data.limit:
            return
        try:
            if row.value is None:
                raise BadRow(row.error or "empty")
            conversation = parse(row.value)
        except BadRow as e:
            yield _Work(row, Conversation("", None, []), [], reason=e.reason)
            continue
        good += 1
        messages = conversation.messages
        # A tool call stays, since the result behind it belongs to it; so does what an assistant says first of all.
        said = [i for i, m in enumerate(messages) if i and m["role"] == "assistant" and not m.get("tool_calls")]
        last = [len(messages)] if messages[-1]["role"] in ("user", "tool") else []
        given = {i: {"turn": i, **vars(answer)} for i, answer in conversation.answers.items()}
        yield _Work(row, conversation, (said if config.regenerate.mode == "all" else []) + last, given)


def _wave(works: list[_Work], template: Template, window: int) -> dict[tuple[int, ...], list[_Work]]:
    """The conversations by the prompt of their next missing turn: equal prompts are answered once."""
    wave: dict[tuple[int, ...], list[_Work]] = {}
    for work in (w for w in works if w.todo):
        try:
            history = work.conversation.messages[: work.todo[0]]
            prompt = tuple(template.ids([template.text(history, work.conversation.tools, prompt=True)])[0])
            if not 0 < len(prompt) < window:
                raise BadRow(f"a prompt of {len(prompt)} tokens leaves no room in the target's window of {window}")
            wave.setdefault(prompt, []).append(work)
        except BadRow as e:
            work.set_aside(e.reason)
    return wave


def _say(work: _Work, ids: list[int], template: Template, spec: TargetSpec) -> None:
    """Put an answer into its conversation, in place of the one that stood there."""
    index, *work.todo = work.todo
    stopped = ids[-1] in spec.eos_token_ids
    text = template.tokenizer.decode(ids[:-1] if stopped else ids, clean_up_tokenization_spaces=False)
    if not text.strip():
        return work.set_aside(f"the target's answer, turn {index + 1}, is empty")
    work.conversation.messages[index : index + 1] = [{"role": "assistant", "content": text}]
    work.answers[index] = {"turn": index, "token_ids": ids, "finish": "stop" if stopped else "length"}


def _line(work: _Work) -> dict[str, Any]:
    """A row of conversations.jsonl; `answers` has the ids as the target said them."""
    conversation, answers = work.conversation, [work.answers[i] for i in sorted(work.answers)]
    line = {"id": conversation.id, "category": conversation.category, "messages": conversation.messages}
    line |= {"tools": conversation.tools} if conversation.tools else {}
    source = {"file": work.row.file, "row": work.row.number}
    return line | {"finish": answers[-1]["finish"] if answers else None, "answers": answers, "source": source}
