"""The evaluate stage: every prompt decoded plainly and with the draft; acceptance, identity and speed.

`outputs.jsonl`, a line a prompt: {set, id, category, prompt, prompt_ids, token_ids, pieces (each token's text),
rounds (accepted draft tokens of each), verdict, ...}. Each prompt goes to `logs/decoded.jsonl` as it is done, with
its seconds, which differ between runs; a killed run goes on after that file's last line.
"""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.config import EvaluateConfig
from eyas.decode.engine import compare, longest, plain_decode, speculative_decode
from eyas.decode.prompts import Prompt, file_prompts, heldout_prompts
from eyas.decode.stats import DEFINITIONS, acceptance
from eyas.draft.io import load_draft
from eyas.draft.model import Eagle3DraftModel
from eyas.files import write_text
from eyas.kernels.few_rows import use_few_rows
from eyas.pipeline import Context
from eyas.progress import bar, warn
from eyas.target.backend import Target
from eyas.target.generate import generate
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights

MIN_ROUNDS = 400  # below, the standard error of tau is above 0.05
MIN_TRAINING = 100  # samples; below, figures only show that the pipeline works


def run(ctx: Context) -> dict[str, Any]:
    """Decode the held-out prompts and those of `evaluate.prompts`; top-level figures are the held-out set's.

    `ok` is False when an output differs from plain decoding beyond a tie.
    """
    own, config = ctx.config.target, ctx.config.evaluate
    spec = TargetSpec.load(own.model, own.revision)
    target = Target.load(spec, own.dtype, ctx.config.torch_device(), own.attention, own.trust_remote_code)
    draft = load_draft(ctx.input("train"), TargetWeights(spec)).to(target.device, target.model.dtype)
    use_few_rows(draft.requires_grad_(False))
    prompts = heldout_prompts(ctx.input("prepare") / "samples.parquet", spec, config.heldout_prompts)
    more, bad = file_prompts(config, target.tokenizer)
    limit = longest(target, draft)
    fit = [p for p in prompts + more if len(p.prompt_ids) < limit]
    result = summarise(decode_all(target, draft, fit, config, ctx.out), config.draft_tokens)
    result["training"] = trained = json.loads((ctx.input("train") / "result.json").read_text())["counts"]
    warnings, refused = result["warnings"], len(prompts + more) - len(fit)
    result["counts"] |= {"refused": refused, "bad_rows": len(bad)}
    if refused:
        warnings.append(f"{refused} prompts fill all {limit} positions and were not decoded")
    if bad:
        warnings.append(f"{len(bad)} rows of the prompt files were set aside, the first: {bad[0]}")
    if trained["samples"] < MIN_TRAINING:
        warnings.append(f"trained on {trained['samples']} samples: a smoke test, no measure of quality")
    for text in warnings:
        warn(text)
    return result


def decode_all(
    target: Target, draft: Eagle3DraftModel, prompts: list[Prompt], config: EvaluateConfig, out: Path
) -> list[dict[str, Any]]:
    """The rows of `outputs.jsonl`, each with its `seconds` {plain, speculative}; decodes what no run has yet.

    The first `config.timed_prompts` of each set are plainly decoded one by one as well, for the speed. The plain
    answers of the others are made in batches, and their `seconds.plain` is None.
    """
    journal = out / "logs" / "decoded.jsonl"
    text = journal.read_text() if journal.is_file() else ""
    write_text(journal, text[: text.rfind("\n") + 1])  # what a killed process left of its last line goes
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    first = {name: [p.set for p in prompts].index(name) for name in {p.set for p in prompts}}
    timed = [i - first[p.set] < config.timed_prompts for i, p in enumerate(prompts)]
    with open(journal, "a", buffering=1) as f, bar("evaluate", len(prompts), "prompts") as progress:
        progress.update(done := len(rows))
        for start in range(0, len(prompts), config.batch_size):
            batch = range(start, min(start + config.batch_size, len(prompts)))
            if batch.stop <= done:
                continue
            together = [i for i in batch if not timed[i]]  # all of the batch's, which a kill must not change
            answers = generate(target, [prompts[i].prompt_ids for i in together], config.max_new_tokens)
            plain = dict(zip(together, answers, strict=True))
            if not rows[done:]:  # warm up: the first calls allocate and choose kernels
                _decode(target, draft, prompts[done], config.model_copy(update={"max_new_tokens": 4}), None)
            for i in batch[max(0, done - start) :]:
                rows.append(_decode(target, draft, prompts[i], config, plain.get(i)))
                f.write(_line(rows[-1]))
                progress.update(1, f"{len(rows[-1]['token_ids']) / rows[-1]['seconds']['speculative']:.1f} tok/s")
    outputs = ({k: v for k, v in row.items() if k != "seconds"} for row in rows)
    write_text(out / "outputs.jsonl", "".join(map(_line, outputs)))
    return rows


def _decode(
    target: Target, draft: Eagle3DraftModel, prompt: Prompt, config: EvaluateConfig, plain: list[int] | None
) -> dict[str, Any]:
    """The row of a prompt; a plain answer that is given is not timed."""
    ids = prompt.prompt_ids
    room = min(config.max_new_tokens, longest(target, draft) - len(ids))
    seconds = None
    if plain is None:
        timed = plain_decode(target, ids, room)
        plain, seconds = timed.token_ids, timed.seconds
    plain = plain[:room]
    drafted = speculative_decode(target, draft, ids, room, config.draft_tokens)
    return asdict(prompt) | {
        "prompt": target.tokenizer.decode(ids),
        "token_ids": drafted.token_ids,
        "pieces": pieces(target.tokenizer, drafted.token_ids),
        "rounds": drafted.rounds,
        "plain_tokens": len(plain),
        **compare(target, ids, plain, drafted.token_ids),
        "seconds": {"plain": seconds, "speculative": drafted.seconds},
    }


def summarise(rows: list[dict[str, Any]], draft_tokens: int) -> dict[str, Any]:
    """The stage's result: figures of each set and category; those that cannot be had are None, with the reason."""

    def figures(**match: Any) -> dict[str, Any]:
        own = [r for r in rows if all(r[k] == v for k, v in match.items())]
        found = acceptance([(len(r["token_ids"]), r["rounds"]) for r in own], draft_tokens)
        verdicts = Counter(r["verdict"] for r in own)
        found |= {"prompts": len(own), "identical": verdicts["identical"], "ties": verdicts["tie"]}
        found["different"] = verdicts["different"]
        timed = [r for r in own if r["seconds"]["plain"] is not None]
        found["timed"] = len(timed)
        if not timed:
            speeds = dict.fromkeys(("baseline_tok_s", "speculative_tok_s", "speedup"))
            reason = "no prompt was timed (evaluate.timed_prompts)" if own else "no prompt was decoded"
            found["not_available"] |= dict.fromkeys(speeds, reason)
            return found | speeds
        plain = sum(r["plain_tokens"] for r in timed) / sum(r["seconds"]["plain"] for r in timed)
        drafted = sum(len(r["token_ids"]) for r in timed) / sum(r["seconds"]["speculative"] for r in timed)
        return found | {"baseline_tok_s": plain, "speculative_tok_s": drafted, "speedup": drafted / plain}

    sets = {}
    for name in dict.fromkeys(["heldout", *(r["set"] for r in rows)]):
        categories = sorted({r["category"] for r in rows if r["set"] == name and r["category"] is not None})
        sets[name] = figures(set=name) | {"by_category": {c: figures(set=name, category=c) for c in categories}}
    keys = ("prompts", "rounds", "tokens", "identical", "ties", "different")
    return {
        **sets["heldout"],
        "ok": not any(s["different"] for s in sets.values()),
        "draft_tokens": draft_tokens,
        "sets": sets,
        "counts": {k: sum(s[k] for s in sets.values()) for k in keys},
        "definitions": DEFINITIONS,
        "warnings": [f"{name}: {doubt}" for name, s in sets.items() for doubt in _doubts(s)],
    }


def _doubts(figures: dict[str, Any]) -> list[str]:
    """What a reader of a set's figures must know."""
    if figures["tau"] is None:
        return [f"no acceptance figures: {figures['not_available']['tau']}"]
    few, different = figures["rounds"] < MIN_ROUNDS, figures["different"]
    doubts = [f"{figures['rounds']} rounds, below {MIN_ROUNDS}: tau is not a stable number"] if few else []
    doubts += ["tau is 1.00: nothing accepted, likely misconfigured"] if figures["tau"] == 1 else []
    return doubts + ([f"{different} outputs differ from plain decoding beyond rounding"] if different else [])


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each token adds; a character made of several tokens comes with its last one."""
    found, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        whole = end == len(ids) or not text.endswith("\ufffd")
        found.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return found


def _line(value: dict[str, Any]) -> str:
    # ASCII: some readers of lines take U+2028 and the like for the end of one.
    return json.dumps(value, allow_nan=False) + "\n"
