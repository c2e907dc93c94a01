"""The prepare stage: conversations to samples (ids and loss mask), split in two, every row accounted for."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from eyas.config import DataConfig
from eyas.data.conversation import BadRow, Conversation, parse
from eyas.data.read import Row, read_rows
from eyas.data.render import Rendered, Template, Turn, assemble
from eyas.data.samples import Sample, write_samples
from eyas.errors import EyasError
from eyas.files import write_text
from eyas.pipeline import Context, source_files
from eyas.progress import bar, say, warn
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer
from eyas.vocab import vocab_facts

CHUNK = 256  # rows tokenised together
COUNTS = ("rows", "conversations", "samples", "train", "heldout", "quarantined", "duplicates", "truncated")
COUNTS += ("samples_dropped", "think_tag_restored", "tokens", "supervised")


def run(ctx: Context) -> dict[str, Any]:
    """Write `samples.parquet` and `quarantine.jsonl`. Raises EyasError when there is nothing to train on."""
    data, target = ctx.config.data, ctx.config.target
    spec = TargetSpec.load(target.model, target.revision)
    tokenizer = load_tokenizer(spec, target.trust_remote_code)
    regenerated = ctx.config.regenerate.mode != "none"
    sources = [str(ctx.input("regenerate") / "conversations.jsonl")] if regenerated else data.sources
    noted = {"target": spec.name, "target_fingerprint": spec.fingerprint, **vocab_facts(tokenizer)}
    noted |= {"supervise": data.supervise, "max_length": data.max_length}
    # how far there is to go, as far as that is cheap to know
    jsonl = [path for path in source_files(sources).values() if path and path.suffix == ".jsonl"]
    total = data.limit or sum(1 for path in jsonl for _ in path.open("rb"))
    work = _Preparation(data, Template(tokenizer))
    with bar("prepare", total, "rows") as progress:
        rows = (progress.update() or row for row in read_rows(sources))
        if regenerated:  # named from the run's folder, which may be moved
            rows = (replace(row, file="regenerate/conversations.jsonl") for row in rows)
        write_samples(ctx.out / "samples.parquet", work.samples(rows), noted)
    write_text(ctx.out / "quarantine.jsonl", "".join(json.dumps(line) + "\n" for line in work.quarantine))
    return work.result()


class _Preparation:
    """One pass over the rows, and what became of them."""

    def __init__(self, config: DataConfig, template: Template):
        self.config, self.template = config, template
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.quarantine: list[dict[str, Any]] = []
        self.examples: list[list[Any]] = []
        self.contents: set[str] = set()
        self.ids: set[str] = set()

    def samples(self, rows: Iterator[Row]) -> Iterator[Sample]:
        """Samples in the order of their rows, until `limit` conversations have given some."""
        for chunk in iter(lambda: list(islice(rows, CHUNK)), []):
            read = [self._read(row) for row in chunk]
            pairs = iter(self.template.tokenize([turn for _, turns in read for turn in turns]))
            for row, (conversation, turns) in zip(chunk, read, strict=True):
                if self.counts["conversations"] == self.config.limit:
                    return
                self.counts["rows"] += 1
                try:
                    if isinstance(conversation, BadRow):
                        raise conversation
                    *said, (prompt, _) = islice(pairs, len(turns))
                    yield from self._samples_of(row, conversation, assemble(said), prompt)
                except BadRow as e:
                    self.counts["quarantined"] += 1
                    self.quarantine.append({"file": row.file, "row": row.number, "reason": e.reason})

    def _read(self, row: Row) -> tuple[Any, list[Turn]]:
        """(conversation, its supervised turns and last its first prompt without an answer), or (BadRow, [])."""
        try:
            if row.value is None:
                raise BadRow(row.error or "empty")
            conversation = parse(row.value)
            self.template.check_answers(conversation)
            turns = self.template.turns(conversation, self.config.supervise)
            return conversation, [*turns, (self.template.first_prompt(conversation), [])]
        except BadRow as e:
            return e, []

    def _samples_of(
        self, row: Row, conversation: Conversation, rendered: list[Rendered], prompt: list[int]
    ) -> Iterator[Sample]:
        longest, content = self.config.max_length, conversation.content_hash()
        if content in self.contents:
            self.counts["duplicates"] += 1
            return
        kept = [r for r in rendered if any(r.loss_mask[:longest])]
        if not kept:
            raise BadRow(f"no supervised token within data.max_length ({longest})")
        id = f"{conversation.id}-{content[:16]}" if conversation.id in self.ids else conversation.id
        self.contents.add(content)
        self.ids.add(id)
        self.counts.update({*conversation.notes, "conversations"})
        self.counts["samples_dropped"] += len(rendered) - len(kept)
        bos, split = self.template.tokenizer.bos_token_id, self._split(conversation)
        for k, r in enumerate(kept, 1):
            ids, mask = r.token_ids[:longest], r.loss_mask[:longest]
            self.counts.update({"samples": 1, split: 1, "tokens": len(ids), "supervised": sum(mask)})
            self.counts["truncated"] += len(ids) < len(r.token_ids)
            self.template.notes["ids start with two begin tokens"] += bos is not None and ids[:2] == [bos, bos]
            if len(self.examples) < 3:
                texts = [self.template.tokenizer.decode([t]) for t in ids[:600]]
                self.examples.append([list(pair) for pair in zip(texts, mask[:600], strict=True)])
            arrays = np.array(ids, np.int32), np.array(mask, np.bool_), np.array(prompt, np.int32)
            name = id if k == 1 else f"{id}/{k}"
            yield Sample(name, split, conversation.category, *arrays, source=row.file, row=row.number)

    def _split(self, conversation: Conversation) -> str:
        """By a hash of the first user turn: the same prompt is never on both sides."""
        i = conversation.first_user_turn()
        text = conversation.content_hash() if i is None else conversation.messages[i]["content"]
        text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
        draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
        return "heldout" if draw < self.config.heldout else "train"

    def result(self) -> dict[str, Any]:
        """The stage's result. Raises EyasError when there is no training sample."""
        n, kinds = self.counts, Counter(re.sub(r"\d+", "N", line["reason"])[:200] for line in self.quarantine)
        reasons = dict(kinds.most_common(20))
        if not n["train"]:
            found = f"{n['rows']} rows, {n['quarantined']} of them set aside, {n['heldout']} samples held out"
            why = "; ".join(f"{count} × {reason}" for reason, count in list(reasons.items())[:3])
            raise EyasError(f"no training sample with a supervised token: {found}", why or "give more rows")
        share = n["supervised"] / n["tokens"]
        warnings = [f"{count} × {note}" for note, count in self.template.notes.items() if count]
        if share >= 0.95:
            warnings.append(f"{share:.1%} of the tokens are supervised: are the user's turns in the samples?")
        if n["quarantined"] > 0.05 * n["rows"]:
            warnings.append(f"{n['quarantined']} of {n['rows']} rows are set aside, see quarantine.jsonl")
        if self.config.heldout and not n["heldout"]:
            warnings.append(f"none of {n['conversations']} conversations fell to the held-out side")
        first = "".join(text for text, supervised in self.examples[0] if supervised)
        told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in n.items())
        say(f"{told} ({share:.1%})\nsupervised in the first sample: {first[:200]!r}")
        for text in warnings:
            warn(text)
        found = {"reasons": reasons, "warnings": warnings, "examples": self.examples}
        return {"counts": dict(n), "supervised_share": round(share, 4)} | found
