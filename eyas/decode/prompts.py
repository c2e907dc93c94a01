"""Which prompts are decoded: first user turns, held out or from files, spread evenly over their categories."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config import EvaluateConfig
from eyas.data.conversation import BadRow, parse
from eyas.data.read import Row, read_rows
from eyas.data.render import Template
from eyas.data.samples import read_samples
from eyas.pipeline import source_files
from eyas.target.spec import TargetSpec


@dataclass(frozen=True)
class Prompt:
    """A first user turn in the target's template, the generation prompt behind it."""

    set: str
    id: str
    category: str | None
    prompt_ids: list[int]


def heldout_prompts(samples: Path, spec: TargetSpec, limit: int) -> list[Prompt]:
    """At most `limit` held-out conversations of prepare's `samples.parquet`, each prompt once."""
    first: dict[tuple[int, ...], Prompt] = {}
    for s in read_samples(samples, "heldout", spec):
        if ids := tuple(s.prompt_ids.tolist()):
            first.setdefault(ids, Prompt("heldout", s.id, s.category, list(ids)))
    return spread(list(first.values()), limit)


def file_prompts(config: EvaluateConfig, tokenizer: Any) -> tuple[list[Prompt], list[str]]:
    """Prompts of `evaluate.prompts`, and the reasons of rows set aside. A set is a file, named after it.

    Rows are conversations or, as in MT-Bench's question file, {question_id, category, turns: [text, ...]}.
    """
    files, template = list(source_files(config.prompts)), Template(tokenizer)
    stems = [Path(f).stem for f in files] + ["heldout"]
    chosen, bad = [], []
    for file in files:
        name, prompts = Path(file).stem if stems.count(Path(file).stem) == 1 else file, []
        for row in read_rows([file]):
            try:
                prompts.append(_prompt(row, name, template))
            except BadRow as e:
                bad.append(f"{row.file} row {row.number}: {e.reason}")
        chosen += spread(prompts, config.limit or len(prompts))
    return chosen, bad


def _prompt(row: Row, name: str, template: Template) -> Prompt:
    if row.value is None:
        raise BadRow(row.error or "no value")
    value, turns = row.value, row.value.get("turns")
    if isinstance(turns, list) and turns:
        value = {"id": value.get("question_id"), "category": value.get("category")}
        value["messages"] = [{"role": "user", "content": turns[0]}]
    conversation = parse(value)
    if not (text := template.first_prompt(conversation)):
        raise BadRow("no user turn")
    return Prompt(name, conversation.id, conversation.category, list(template.ids([text])[0]))


def spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """At most `limit`, taking turns over the categories; the order within a category is kept."""
    queues: dict[str | None, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        queues[prompt.category].append(prompt)
    turns = range(max(map(len, queues.values()), default=0))
    return [queue[i] for i in turns for queue in queues.values() if i < len(queue)][:limit]
