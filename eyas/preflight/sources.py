"""Config: can the data be read, and does the target's template render it as it is? A few rows of each source."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.data.conversation import Answer, BadRow, Conversation, parse
from eyas.data.read import Row, read_rows
from eyas.data.render import Rendered, Template, assemble
from eyas.pipeline import source_files
from eyas.preflight.finding import Check, Finding, NotMade, Subject, error, info, warning

FILES, ROWS, OF_FIRST = 8, 12, 240  # files looked at; rows of each, spread over so many of its first
WHOLE = 1 << 28  # bytes: a .json file can only be read as a whole
MANY_BAD = 0.5  # share of rows that are lost: the data and the template do not go together
SHOWN = 200  # tokens of a sample kept as evidence


def sources_are_there(s: Subject) -> Iterator[Finding]:
    data, asked = s.config.data, s.config.evaluate.prompts
    if not data.sources:
        yield error("data.sources is empty: there is nothing to learn from", "name JSONL, JSON or Parquet files")
        return
    files, prompts = source_files(data.sources), source_files(asked)
    for name, path in (files | prompts).items():
        if path and path.suffix not in (".jsonl", ".json", ".parquet"):
            yield error(f"{path}: unknown kind of file", "expected .jsonl, .json or .parquet")
        elif path and not path.stat().st_size:
            yield error(f"{path} is empty (0 bytes)", "write it again, or take it out of the config")
        elif path is None:
            yield info(f"{name} is a data set on the hub: its rows are looked at when prepare reads them")
    real = {p.resolve(): n for n, p in files.items() if p}
    for name, path in prompts.items():
        if path and path.resolve() in real:
            text = f"evaluate.prompts names {name}, which data.sources has too: the draft would be judged on what"
            yield error(f"{text} it was trained on", "take the file out of one of the two")
    size = sum(p.stat().st_size for p in files.values() if p)
    yield info(f"{len(files)} sources, {size / 1e6:,.1f} MB")


def rows_can_be_rendered(s: Subject) -> Iterator[Finding]:
    """Every fault that prepare would set rows aside for, in a few rows, before hours of answers and states."""
    template = Template(s.tokenizer)
    bad: dict[str, str] = {}
    rendered: list[tuple[Row, Rendered]] = []
    rows = some_rows(s.config.data.sources)
    for row in rows:
        try:
            if row.value is None:
                raise BadRow(row.error or "empty")
            rendered += [(row, r) for r in render_row(s, template, parse(row.value))]
        except BadRow as e:
            bad[f"{Path(row.file).name} row {row.number}"] = e.reason
    if not rows:
        raise NotMade("no source can be looked at before it is read as a whole", "prepare will say what it finds")
    kinds = Counter(bad.values())
    firsts = {reason: where for where, reason in reversed(bad.items())}
    told = [f"{firsts[reason]}: {reason}{f' ({n} rows)' * (n > 1)}" for reason, n in kinds.most_common(3)]
    text = f"{len(bad)} of {len(rows)} sampled rows cannot become samples: {'; '.join(told)}"
    hint = "mend the rows, or let them be set aside; a template that edits text needs data that it keeps"
    if len(bad) > MANY_BAD * len(rows):
        yield error(text, hint, {"rows": bad})
    elif bad:
        yield warning(text, hint, {"rows": bad})
    for note, count in template.notes.items():
        yield info(f"{count} × {note}")
    yield from lengths_and_ids(s, rendered)
    if spoken := next((r for _, r in rendered if any(r.loss_mask)), None):
        yield shown(s.tokenizer, spoken.token_ids, spoken.loss_mask, "sampled row")


def lengths_and_ids(s: Subject, rendered: list[tuple[Row, Rendered]]) -> Iterator[Finding]:
    longest, vocab, positions = s.config.data.max_length, s.spec.vocab_size, s.spec.max_position_embeddings
    if not rendered:
        return
    row, most = max(rendered, key=lambda pair: max(pair[1].token_ids, default=0))
    if (highest := max(most.token_ids, default=0)) >= vocab:
        text = f"{Path(row.file).name} row {row.number} holds token id {highest}"
        yield error(f"{text}, the target knows ids below {vocab}", "tokenizer and model do not belong together")
    row, most = max(rendered, key=lambda pair: len(pair[1].token_ids))
    if min(len(most.token_ids), longest) > positions:
        text = f"{Path(row.file).name} row {row.number} has {len(most.token_ids)} tokens, the target {positions}"
        yield error(f"{text} positions", f"set data.max_length to {positions} or less")
    answered = [r for _, r in rendered if any(r.loss_mask)] if s.config.regenerate.mode == "none" else []
    cut = sum(len(r.token_ids) > longest for r in answered)
    silent = sum(not any(r.loss_mask[:longest]) for r in answered)
    if answered and silent == len(answered):
        text = f"no sampled answer begins within data.max_length {longest}"
        yield error(text, f"raise it: a sampled row has up to {len(most.token_ids)} tokens")
    elif cut:
        text = f"{cut} of {len(answered)} sampled rows are longer than data.max_length {longest}"
        yield (warning if cut > 0.1 * len(answered) else info)(f"{text}: cut at the end", "raise data.max_length")
    bos = s.tokenizer.bos_token_id
    if doubled := sum(bos is not None and r.token_ids[:2] == [bos, bos] for _, r in rendered):
        text = f"{doubled} of {len(rendered)} sampled rows begin with two begin tokens ({s.tokenizer.bos_token!r})"
        yield warning(text, "let the chat template write one; a server would send the same two")


def render_row(s: Subject, template: Template, conversation: Conversation) -> list[Rendered]:
    """The row's samples. Where the target is to answer, its answer is an end-of-turn token."""
    mode, messages, answers = s.config.regenerate.mode, list(conversation.messages), dict(conversation.answers)
    if mode != "none" and messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
        answers[len(messages) - 1] = Answer(s.spec.eos_token_ids[:1], "stop")
    for i, message in enumerate(messages):
        if mode == "all" and message["role"] == "assistant":
            answers[i] = Answer(s.spec.eos_token_ids[:1], "stop")
    asked = replace(conversation, messages=messages, answers=answers)
    return assemble(template.tokenize(template.turns(asked, s.config.data.supervise)))


def some_rows(sources: list[str]) -> list[Row]:
    """Rows of at most FILES files, each ROWS of its first OF_FIRST."""
    files = [name for name, path in source_files(sources).items() if path and readable(path)]
    rows: list[Row] = []
    for name in files[:: -(-len(files) // FILES) or 1]:
        first = list(islice(read_rows([name]), OF_FIRST))
        rows += first[:: -(-len(first) // ROWS) or 1]
    return rows


def readable(path: Path) -> bool:
    return path.stat().st_size > 0 and (path.suffix != ".json" or path.stat().st_size < WHOLE)


def shown(tokenizer: Any, ids: Any, mask: Any, what: str) -> Finding:
    """A sample for the eye: supervised text in the message, every token with its bit in the evidence."""
    pairs = [[tokenizer.decode([int(i)]), int(m)] for i, m in zip(ids[:SHOWN], mask[:SHOWN], strict=True)]
    said = "".join(text for text, m in pairs if m)
    text = f"{what}: {sum(map(int, mask))} of {len(mask)} tokens are supervised: {said[:120]!r}"
    return info(text, evidence={"tokens": pairs})


CHECKS = [
    Check("sources", "config", (), sources_are_there),
    Check("rows", "config", ("target", "sources"), rows_can_be_rendered),
]
