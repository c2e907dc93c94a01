"""Data: what prepare made, in samples: ids, masks, split, and that they still follow from the sources."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eyas.data.conversation import BadRow, parse
from eyas.data.read import read_rows
from eyas.data.render import Template, assemble
from eyas.data.samples import Sample, check_target
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.preflight.masks import edges, moved
from eyas.preflight.sources import readable, shown

AGAIN = "run `eyas prepare` again"
AGAIN_ROWS, OF_FIRST = 8, 2000  # samples rendered once more; their rows are among so many first of their file


def samples_are_this_runs(s: Subject) -> Iterator[Finding]:
    seen = s.prepared  # opening checks mask and split of each sample
    check_target(seen.path, seen.noted, s.spec)
    for key in ("supervise", "max_length"):
        if key in seen.noted and seen.noted[key] != (now := getattr(s.config.data, key)):
            text = f"{seen.path} was made with data.{key} {seen.noted[key]}, the config says {now}"
            yield error(text, AGAIN)
    vocab, bos = s.spec.vocab_size, s.tokenizer.bos_token_id
    if (known := seen.noted.get("tokenizer_length", 0)) > vocab:
        text = f"the tokenizer has {known} ids, the target's config.json says vocab_size {vocab}"
        yield warning(text, "tokens were added that the model has no rows for")
    for sample in (x for x in seen.samples if x.token_ids.max() >= vocab):
        at = int(sample.token_ids.argmax())
        text = f"{seen.path}: sample {sample.id}: token {at} is {sample.token_ids[at]}"
        yield error(f"{text}, the target knows ids below {vocab}", "tokenizer and model do not belong together")
        break
    if doubled := [x.id for x in seen.samples if bos is not None and list(x.token_ids[:2]) == [bos, bos]]:
        text = f"{len(doubled)} of {len(seen.samples)} samples begin with two begin tokens, such as {doubled[0]}"
        yield warning(text, "let the chat template write one; a server would send the same two")
    yield info(f"{len(seen.samples):,} of {seen.total:,} samples looked at")
    for sample in seen.samples[:2]:
        yield shown(s.tokenizer, sample.token_ids, sample.loss_mask, f"sample {sample.id}")


def masks_cover_the_answers(s: Subject) -> Iterator[Finding]:
    samples, ends = s.prepared.samples, {*s.spec.eos_token_ids, *s.prepared.noted.get("added_ids", [])}
    tokens, supervised = (
        sum(map(f, samples)) for f in (lambda x: len(x.token_ids), lambda x: int(x.loss_mask.sum()))
    )
    if (share := supervised / tokens) >= 0.95:
        text = f"{share:.1%} of the tokens are supervised: the prompts too, it seems"
        yield warning(text, "look at the sample above; data.supervise says which turns count", {"share": share})
    header = next((int(x.prompt_ids[-1]) for x in samples if len(x.prompt_ids)), None)
    yield edges([(x.id, x.token_ids, x.loss_mask) for x in samples], ends, header)
    longest = s.config.data.max_length
    if (cut := sum(len(x.token_ids) >= longest for x in samples)) > 0.1 * len(samples):
        text = f"{cut} of {len(samples)} samples fill data.max_length {longest}: their answers are cut"
        yield warning(text, "raise data.max_length, or leave such rows out")


def samples_follow_from_the_sources(s: Subject) -> Iterator[Finding]:
    """Render some rows once more: ids and masks must come out the same, turn by turn."""
    template, run = Template(s.tokenizer), Path(s.config.run_dir)
    by_row: dict[tuple[str, int], list[Sample]] = {}
    for sample in s.prepared.samples:
        by_row.setdefault((sample.source, sample.row), []).append(sample)
    near = [key for key in by_row if key[1] <= OF_FIRST]
    chosen = near[:: -(-len(near) // AGAIN_ROWS) or 1]
    same = 0
    for name in dict.fromkeys(file for file, _ in chosen):
        # rows of answered conversations are named from the run's folder
        path = run / name if (run / name).is_file() else Path(name)
        if not path.is_file() or not readable(path):
            yield info(f"{name} is not here to be compared with")
            continue
        wanted = {row for file, row in chosen if file == name}
        for row in read_rows([str(path)]):
            if row.number in wanted and row.value is not None:
                found = list(compare(s, template, row.value, by_row[name, row.number], f"{name} row {row.number}"))
                yield from found
                same += not found
            if row.number >= max(wanted):
                break
    yield info(f"{same} of {len(chosen)} rows rendered again: the same ids and masks")


def compare(s: Subject, template: Template, value: dict, stored: list[Sample], where: str) -> Iterator[Finding]:
    try:
        turns = template.turns(parse(value), s.config.data.supervise)
    except BadRow as e:
        yield error(
            f"{where} can no longer be rendered: {e.reason}", f"the row or the chat template changed: {AGAIN}"
        )
        return
    longest = s.config.data.max_length
    again = [r for r in assemble(template.tokenize(turns)) if any(r.loss_mask[:longest])]
    for sample, r in zip(stored, again, strict=False):  # a limit may have cut a conversation's last samples
        ids, mask = np.array(r.token_ids[:longest]), np.array(r.loss_mask[:longest])
        at = f"sample {sample.id} ({where})"
        if len(ids) != len(sample.token_ids) or (ids != sample.token_ids).any():
            n = min(len(ids), len(sample.token_ids))
            first = int(np.append((ids[:n] != sample.token_ids[:n]).nonzero()[0], n)[0])
            pair = [s.tokenizer.decode(x[first : first + 4]) for x in (sample.token_ids, ids)]
            text = f"{at}: from token {first} on it is {pair[0]!r}, rendered now {pair[1]!r}"
            yield error(text, f"source, tokenizer or chat template changed: {AGAIN}")
        elif (mask != sample.loss_mask).any():
            said = moved(sample.loss_mask, mask)
            yield error(f"{at}: the loss mask {said}", f"{AGAIN}; a mask is never moved apart from its ids")


def split_does_not_leak(s: Subject) -> Iterator[Finding]:
    samples = s.prepared.samples
    prompts: dict[str, dict[bytes, Sample]] = {"train": {}, "heldout": {}}
    for x in samples:
        if len(x.prompt_ids):
            prompts[x.split].setdefault(x.prompt_ids.tobytes(), x)
    both = prompts["train"].keys() & prompts["heldout"].keys()
    for key in list(both)[:1]:
        one, other = prompts["heldout"][key], prompts["train"][key]
        text = f"{len(both)} first prompts are on both sides of the split: {one.id} is held out, {other.id} not"
        said = s.tokenizer.decode(one.prompt_ids)[-120:]
        yield error(text, f"{AGAIN}: it splits by the first prompt", {"prompt": said})
    counts = Counter(x.token_ids.tobytes() for x in samples)
    if twice := sum(n - 1 for n in counts.values()):
        first = next(x.id for x in samples if counts[x.token_ids.tobytes()] > 1)
        text = f"{twice} of {len(samples)} samples repeat another, such as {first}"
        yield warning(text, "prepare drops rows that say the same: were samples joined from several files?")
    number = {split: sum(x.split == split for x in samples) for split in prompts}
    if s.config.data.heldout and not number["heldout"] and len(samples) == s.prepared.total:
        yield warning("no sample is held out: the best step cannot be told", "raise data.heldout")
    yield info(
        f"{number['train']} training and {number['heldout']} held-out samples compared: prompts, repetitions"
    )


CHECKS = [
    Check("samples", "data", ("target",), samples_are_this_runs),
    Check("mask", "data", ("samples",), masks_cover_the_answers),
    Check("rendering", "data", ("samples",), samples_follow_from_the_sources),
    Check("leaks", "data", ("samples",), split_does_not_leak),
]
