"""The regenerate stage: the target answers the conversations itself, turn after turn, batch by batch.

Wave k answers the k-th missing turn of every conversation, as its prompt holds the turns before. A wave's distinct
prompts are sorted by length and cut into batches up front; each finished batch goes to a journal in `logs/`, from
which a killed run goes on to the same bytes.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eyas import __version__
from eyas.config import RunConfig
from eyas.data.conversation import BadRow, Conversation, parse
from eyas.data.read import Row, read_rows
from eyas.data.render import Template
from eyas.errors import EyasError
from eyas.files import sha256_json, write_json, write_text
from eyas.pipeline import Context
from eyas.progress import bar, say, warn
from eyas.target.backend import Target, resolve_dtype
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
    """Write `conversations.jsonl`, `quarantine.jsonl` and `provenance.json`; the result has counts and reasons."""
    config, choice, wanted = ctx.config, ctx.config.regenerate, ctx.config.target
    spec, device = TargetSpec.load(wanted.model, wanted.revision), config.torch_device()
    if not spec.eos_token_ids:
        raise EyasError(
            f"{spec.path} names no eos_token_id: no answer would end", "add it to generation_config.json"
        )
    template = Template(load_tokenizer(spec, wanted.trust_remote_code))
    works = list(_works(config))
    decoding = (choice.max_new_tokens, choice.temperature, choice.top_p, config.seed)
    journal, target = _Journal(ctx.out / "logs" / "batches.jsonl"), None
    with bar("regenerate", sum(len(w.todo) for w in works), "turns") as progress:
        while wave := _wave(works, template, spec.max_position_embeddings):
            target = target or Target.load(spec, wanted.dtype, device, wanted.attention, wanted.trust_remote_code)
            prompts = sorted(wave, key=lambda p: (-len(p), p))  # longest first: what does not fit fails at once
            for start in range(0, len(prompts), choice.batch_size):
                batch = [list(p) for p in prompts[start : start + choice.batch_size]]
                said = journal.answers(batch, lambda b, t=target: generate(t, b, *decoding))
                for prompt, ids in zip(batch, said, strict=True):
                    for work in wave[tuple(prompt)]:
                        _say(work, ids, template, spec)
                        progress.update()
    good, bad = [w for w in works if w.reason is None], [w for w in works if w.reason is not None]
    write_text(
        ctx.out / "conversations.jsonl", "".join(json.dumps(_line(w), ensure_ascii=False) + "\n" for w in good)
    )
    lines = [{"file": w.row.file, "row": w.row.number, "reason": w.reason} for w in bad]
    write_text(ctx.out / "quarantine.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    made_by = {
        "target": {"name": spec.name, "revision": wanted.revision, "fingerprint": spec.fingerprint},
        "decoding": choice.model_dump() | {"seed": config.seed},
        "engine": f"transformers {version('transformers')}, torch {version('torch')}, eyas {__version__}",
        "dtype": str(resolve_dtype(spec, wanted.dtype, device)).removeprefix("torch."),
        "attention": wanted.attention,
        "device": device,
    }
    write_json(ctx.out / "provenance.json", made_by)
    return _result(good, bad)


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
        given = {
            i: {"turn": i, "token_ids": a.token_ids, "finish": a.finish} for i, a in conversation.answers.items()
        }
        yield _Work(row, conversation, (said if config.regenerate.mode == "all" else []) + last, given)


def _wave(works: list[_Work], template: Template, window: int) -> dict[tuple[int, ...], list[_Work]]:
    """The conversations by the prompt of their next missing turn: equal prompts are answered once."""
    wave: dict[tuple[int, ...], list[_Work]] = {}
    for work in works:
        if not work.todo:
            continue
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


def _result(good: list[_Work], bad: list[_Work]) -> dict[str, Any]:
    answers = [a for w in good for a in w.answers.values()]
    counts = {
        "rows": len(good) + len(bad),
        "conversations": len(good),
        "quarantined": len(bad),
        "answers": len(answers),
    }
    counts |= {"tokens": sum(len(a["token_ids"]) for a in answers)}
    counts |= {"cut": sum(a["finish"] == "length" for a in answers)}
    say(f"{len(answers)} answers of {counts['tokens']} tokens; {len(bad)} of {counts['rows']} rows set aside")
    warnings = [] if answers else ["no conversation has a turn for the target to answer"]
    if counts["cut"] > 0.2 * len(answers):
        warnings.append(f"{counts['cut']} of {len(answers)} answers were cut at regenerate.max_new_tokens")
    for text in warnings:
        warn(text)
    reasons = Counter(w.reason for w in bad)
    return {"counts": counts, "reasons": dict(reasons.most_common(20)), "warnings": warnings}


class _Journal:
    """Finished batches, one JSON line each; a line torn by a kill is not JSON, and its batch is made again."""

    def __init__(self, path: Path):
        self.path, self.done = path, {}
        for line in path.read_text().split("\n") if path.is_file() else []:
            try:
                self.done |= json.loads(line)
            except json.JSONDecodeError:
                continue

    def answers(
        self, batch: list[list[int]], make: Callable[[list[list[int]]], list[list[int]]]
    ) -> list[list[int]]:
        """The answers of a batch of prompts: those written down, or new ones, written down at once."""
        key = sha256_json(batch)
        if key not in self.done:
            self.done[key] = make(batch)
            with open(self.path, "a") as f:
                f.write("\n" + json.dumps({key: self.done[key]}))
                f.flush()
                os.fsync(f.fileno())
        return self.done[key]
