"""Which prompts are decoded: held-out conversations, and files of the user's, spread evenly over their categories."""

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
    """A first user turn, rendered by the target's template with the generation prompt behind it."""

    set: str
    id: str
    category: str | None
    token_ids: list[int]


def heldout_prompts(samples: Path, spec: TargetSpec, limit: int) -> list[Prompt]:
    """At most `limit` held-out conversations of prepare's `samples.parquet`, each prompt once."""
    prompts: dict[tuple[int, ...], Prompt] = {}
    for s in read_samples(samples, "heldout", spec):
        if ids := tuple(s.prompt_ids.tolist()):
            prompts.setdefault(ids, Prompt("heldout", s.id, s.category, list(ids)))
    return spread(list(prompts.values()), limit)


def file_prompts(config: EvaluateConfig, tokenizer: Any) -> tuple[list[Prompt], list[str]]:
    """Prompts of `evaluate.prompts`, a set for each file, and the reasons of the rows set aside.

    A set is named after its file; files of one name are told apart by their paths. Rows are conversations (their
    first user turn counts) or, as in MT-Bench's question files, {question_id, category, turns: [text, ...]}.
    """
    files, template = list(source_files(config.prompts)), Template(tokenizer)
    stems = [Path(f).stem for f in files] + ["heldout"]
    chosen: list[Prompt] = []
    bad: list[str] = []
    for file in files:
        name = Path(file).stem if stems.count(Path(file).stem) == 1 else file
        prompts: list[Prompt] = []
        for row in read_rows([file]):
            try:
                prompts.append(_prompt(row, name, template))
            except BadRow as e:
                bad.append(f"{row.file} row {row.number}: {e.reason}")
        chosen += spread(prompts, config.limit or len(prompts))
    return chosen, bad


def _prompt(row: Row, name: str, template: Template) -> Prompt:
    value = row.value
    if value is None:
        raise BadRow(row.error or "no value")
    turns = value.get("turns")
    if isinstance(turns, list) and turns:
        question = {
            "messages": [{"role": "user", "content": turns[0]}],
            "id": value.get("question_id", row.number),
        }
        value = question | {"category": value.get("category")}
    conversation = parse(value)
    text = template.first_prompt(conversation)
    if not text:
        raise BadRow("no user turn")
    return Prompt(name, conversation.id, conversation.category, list(template.ids([text])[0]))


def spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """At most `limit`, taking turns over the categories; order within a category is kept."""
    queues: dict[str | None, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        queues[prompt.category].append(prompt)
    turns = max(map(len, queues.values()), default=0)
    return [queue[i] for i in range(turns) for queue in queues.values() if i < len(queue)][:limit]
