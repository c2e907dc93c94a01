"""The evaluate stage: every prompt decoded plainly and with the draft; acceptance, identity and speed.

`outputs.jsonl` has one line a prompt: {set, id, category, prompt, token_ids, pieces (text of each token), rounds
(accepted draft tokens of each round), identical, verdict, ...}. The first token comes from the prompt's own pass, then
each round gives its accepted tokens and one of the target's own (unless the end of the answer cut it). Decoding goes
on after the last line that a killed run left; seconds differ between runs and are kept apart, under logs/.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.decode.engine import longest, parting, plain_decode, speculative_decode
from eyas.decode.prompts import Prompt, file_prompts, heldout_prompts
from eyas.decode.stats import DEFINITIONS, acceptance
from eyas.draft.io import load_draft
from eyas.draft.model import Eagle3DraftModel
from eyas.errors import EyasError
from eyas.files import write_text
from eyas.pipeline import Context
from eyas.progress import bar, warn
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights

MIN_ROUNDS = 400  # the standard error of tau is then about 0.05
MIN_TRAINING = 100  # samples; below, the figures only show that the pipeline works


def run(ctx: Context) -> dict[str, Any]:
    """Decode the held-out prompts and those of `evaluate.prompts`. Top-level figures are the held-out set's."""
    config = ctx.config
    spec = TargetSpec.load(config.target.model, config.target.revision)
    target = Target.load(
        spec,
        config.target.dtype,
        config.torch_device(),
        config.target.attention,
        config.target.trust_remote_code,
    )
    draft = load_draft(ctx.input("train"), TargetWeights(spec)).to(target.device, target.model.dtype)
    prompts = heldout_prompts(ctx.input("prepare") / "samples.parquet", spec, config.evaluate.heldout_prompts)
    more, bad = file_prompts(config.evaluate, target.tokenizer)
    limit = longest(target, draft)
    long = [p for p in prompts + more if len(p.token_ids) >= limit]
    prompts = [p for p in prompts + more if len(p.token_ids) < limit]
    _decode_all(target, draft, prompts, config.evaluate.max_new_tokens, config.evaluate.draft_tokens, ctx.out)
    trained = json.loads((ctx.input("prepare") / "result.json").read_text())["counts"]
    result = summarise(_read(ctx.out / "outputs.jsonl"), _seconds(ctx.out), config.evaluate.draft_tokens)
    result["training"] = {"samples": trained["train"], "supervised_tokens": trained["supervised"]}
    result["counts"] |= {"refused": len(long), "bad_rows": len(bad)}
    warnings = result["warnings"]
    if long:
        ids = ", ".join(p.id for p in long[:3])
        warnings.append(f"{len(long)} prompts fill all {limit} positions and were not decoded: {ids}")
    if bad:
        warnings.append(f"{len(bad)} rows of the prompt files were set aside; the first: {bad[0]}")
    if trained["train"] < MIN_TRAINING:
        warnings.append(f"trained on {trained['train']} samples only: a smoke test, not a measure of quality")
    for text in warnings:
        warn(text)
    return result


def _decode_all(
    target: Target, draft: Eagle3DraftModel, prompts: list[Prompt], new_tokens: int, draft_tokens: int, out: Path
) -> None:
    """Decode every prompt that `outputs.jsonl` does not hold yet, appending whole lines."""
    path = out / "outputs.jsonl"
    done = _read(path)
    if [(r["set"], r["id"]) for r in done] != [(p.set, p.id) for p in prompts[: len(done)]]:
        done = []
    write_text(path, "".join(_line(r) for r in done))  # without the half line of a killed run
    limit = longest(target, draft)
    for prompt in prompts[len(done) :][:1]:  # warm up: first calls allocate and choose kernels
        room = min(4, limit - len(prompt.token_ids))
        plain_decode(target, prompt.token_ids, room)
        speculative_decode(target, draft, prompt.token_ids, room, draft_tokens)
    with (
        open(path, "a") as outputs,
        open(out / "logs" / "seconds.jsonl", "a") as seconds,
        bar("evaluate", len(prompts), "prompts") as progress,
    ):
        progress.update(len(done))
        for prompt in prompts[len(done) :]:
            room = min(new_tokens, limit - len(prompt.token_ids))
            plain = plain_decode(target, prompt.token_ids, room)
            drafted = speculative_decode(target, draft, prompt.token_ids, room, draft_tokens)
            compared = parting(target, prompt.token_ids, plain.token_ids, drafted.token_ids)
            row = asdict(prompt) | {
                "prompt": target.tokenizer.decode(prompt.token_ids),
                "prompt_ids": prompt.token_ids,
                "token_ids": drafted.token_ids,
                "pieces": _pieces(target.tokenizer, drafted.token_ids),
                "rounds": drafted.rounds,
                "plain_tokens": len(plain.token_ids),
                "identical": compared["verdict"] == "identical",
                **compared,
            }
            # Seconds first: a row that is there has its seconds, and seconds without a row are overwritten.
            times = {"set": prompt.set, "id": prompt.id, "plain": plain.seconds, "speculative": drafted.seconds}
            for file, value in ((seconds, times), (outputs, row)):
                file.write(_line(value))
                file.flush()
                os.fsync(file.fileno())
            progress.update(1, f"{len(drafted.token_ids) / drafted.seconds:.1f} tok/s")


def summarise(
    rows: list[dict[str, Any]], seconds: dict[tuple[str, str], dict[str, Any]], draft_tokens: int
) -> dict[str, Any]:
    """The stage's result from the lines of `outputs.jsonl` and seconds by (set, id): figures of each set."""
    sets: dict[str, Any] = {}
    for name in dict.fromkeys(["heldout"] + [r["set"] for r in rows]):
        own = [r for r in rows if r["set"] == name]
        categories = sorted({r["category"] for r in own if r["category"] is not None})
        sets[name] = _figures(own, seconds, draft_tokens) | {
            "by_category": {
                c: _figures([r for r in own if r["category"] == c], seconds, draft_tokens) for c in categories
            }
        }
    warnings = [w for name, figures in sets.items() for w in _doubts(name, figures)]
    counts = {"prompts": len(rows), "rounds": sum(len(r["rounds"]) for r in rows)}
    counts |= {"tokens": sum(len(r["token_ids"]) for r in rows)}
    if counts["tokens"] > counts["prompts"] and not counts["rounds"]:
        raise EyasError("the draft was never used: answers have more than one token, but no round drafted any")
    if not sets["heldout"]["prompts"]:
        sets.pop("heldout")
    whole = _figures([r for r in rows if r["set"] == "heldout"], seconds, draft_tokens) | {"by_category": {}}
    return {
        **sets.get("heldout", whole),
        "ok": not any(s["different"] for s in sets.values()),
        "draft_tokens": draft_tokens,
        "sets": sets,
        "counts": counts,
        "definitions": DEFINITIONS,
        "warnings": warnings,
    }


def _figures(
    rows: list[dict[str, Any]], seconds: dict[tuple[str, str], dict[str, Any]], draft_tokens: int
) -> dict[str, Any]:
    """Acceptance, identity and speed of some prompts. A figure that cannot be had is None; `not_available` says why."""
    figures = acceptance(((len(r["token_ids"]), r["rounds"]) for r in rows), draft_tokens)
    verdicts = [r["verdict"] for r in rows]
    figures |= {"prompts": len(rows), "identical": verdicts.count("identical")}
    figures |= {"ties": verdicts.count("tie"), "different": verdicts.count("different")}
    timed = [(r, seconds[r["set"], r["id"]]) for r in rows if (r["set"], r["id"]) in seconds]
    if timed:
        plain = sum(r["plain_tokens"] for r, _ in timed) / sum(s["plain"] for _, s in timed)
        drafted = sum(len(r["token_ids"]) for r, _ in timed) / sum(s["speculative"] for _, s in timed)
        return figures | {"baseline_tok_s": plain, "speculative_tok_s": drafted, "speedup": drafted / plain}
    names = ("baseline_tok_s", "speculative_tok_s", "speedup")
    reason = "no prompt was decoded" if not rows else "the seconds of these prompts were lost"
    figures["not_available"] |= dict.fromkeys(names, reason)
    return figures | dict.fromkeys(names)


def _doubts(name: str, figures: dict[str, Any]) -> list[str]:
    """What a reader of a set's figures must know."""
    if figures["tau"] is None:
        return [f"{name}: no acceptance figures: {figures['not_available']['tau']}"]
    doubts = []
    if figures["rounds"] < MIN_ROUNDS:
        doubts.append(f"{name}: {figures['rounds']} rounds, below {MIN_ROUNDS}: tau is not a stable number")
    if figures["tau"] == 1:
        doubts.append(f"{name}: tau is 1.00: nothing accepted, likely misconfigured")
    if figures["different"]:
        doubts.append(f"{name}: {figures['different']} outputs differ from plain decoding beyond rounding")
    return doubts


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each token adds. A character of several tokens appears with its last one."""
    pieces, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        whole = end == len(ids) or not text.endswith("\ufffd")
        pieces.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return pieces


def _seconds(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(s["set"], s["id"]): s for s in _read(out / "logs" / "seconds.jsonl")}


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; what a killed process left of one is passed over."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
