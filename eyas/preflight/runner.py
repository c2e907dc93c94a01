"""Run the checks in order, go on after a failure, and say what was found."""

import math
import time
import traceback
from typing import Any

from rich.markup import escape
from rich.table import Table

from eyas.config import RunConfig
from eyas.errors import EyasError, UsageError
from eyas.preflight import alignment, dry_run, features, model
from eyas.preflight.finding import Check, Finding, NotMade, Subject
from eyas.progress import console

CHECKS: list[Check] = [*features.CHECKS, *alignment.CHECKS, *model.CHECKS, *dry_run.CHECKS]
STAGES = list(dict.fromkeys(c.stage for c in CHECKS))


def run_preflight(
    config: RunConfig, stages: list[str] | None = None, skip: list[str] | None = None
) -> dict[str, Any]:
    """Look at the finished stages of `config.run_dir`; nothing in it is written.

    `stages`: only these; `skip`: names of stages or checks to leave out. Returns the JSON object of `eyas preflight`:
    {"ok", "seconds", "stages": [{"name", "status", "seconds", "findings": [{"check", "level", "message", "hint",
    "evidence"}]}]}; `ok` is False when any finding is an error. Raises UsageError for an unknown stage or check.
    """
    skip = skip or []
    known = {*STAGES, *(c.name for c in CHECKS)}
    for name in [*(stages or []), *skip]:
        if name not in known or (name in (stages or []) and name not in STAGES):
            raise UsageError(f"preflight has no {name!r}", f"stages: {', '.join(STAGES)}; checks: {', '.join(known)}")
    return run_checks(Subject(config), [c for c in CHECKS if c.stage in (stages or STAGES)], skip)


def run_checks(subject: Subject, checks: list[Check], skip: list[str]) -> dict[str, Any]:
    """Run `checks` in the order given; see `run_preflight`."""
    begin = time.perf_counter()
    state: dict[str, str] = {}  # check -> "ran", "failed", "was skipped" or "left out"
    report: list[dict[str, Any]] = []
    for stage in dict.fromkeys(c.stage for c in checks):
        start = time.perf_counter()
        findings: list[dict[str, Any]] = []
        mine = [c for c in checks if c.stage == stage]
        for check in mine:
            state[check.name], found = _run(subject, check, skip, state)
            findings += [{"check": check.name, **vars(f), "evidence": _json(f.evidence)} for f in found]
        levels = {f["level"] for f in findings}
        if "error" in levels:
            status = "failed"
        elif all(state[c.name] in ("was skipped", "left out") for c in mine):
            status = "skipped"
        else:
            status = "warned" if "warning" in levels else "passed"
        seconds = round(time.perf_counter() - start, 3)
        report.append({"name": stage, "status": status, "seconds": seconds, "findings": findings})
    ok = all(s["status"] != "failed" for s in report)
    return {"ok": ok, "seconds": round(time.perf_counter() - begin, 3), "stages": report}


def _run(
    subject: Subject, check: Check, skip: list[str], state: dict[str, str]
) -> tuple[str, list[Finding]]:
    """State and findings of one check."""
    if check.name in skip or check.stage in skip:
        return "left out", [Finding("info", "skipped: asked for")]
    for need in check.needs:
        if state.get(need) in ("failed", "was skipped"):
            return "was skipped", [Finding("info", f"skipped: {need} {state[need]}")]
    try:
        found = list(check.run(subject))
    except NotMade as e:
        return "was skipped", [Finding("info", f"skipped: {e}", "make it with `eyas run CONFIG`")]
    except EyasError as e:
        found = [Finding("error", e.message, e.hint)]
    except Exception as e:  # a check that crashes has found something too
        last = traceback.extract_tb(e.__traceback__)[-1]
        text = f"the check itself failed: {type(e).__name__}: {e}"
        found = [Finding("error", text, evidence={"at": f"{last.filename}:{last.lineno}"})]
    return "failed" if any(f.level == "error" for f in found) else "ran", found


def _json(value: Any) -> Any:
    """`value` as plain JSON; numbers that JSON lacks (NaN, infinity) become text."""
    if isinstance(value, dict):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def render(result: dict[str, Any]) -> None:
    """Print a result of `run_preflight` to stderr."""
    colour = {"passed": "green", "warned": "yellow", "failed": "red", "skipped": "dim"}
    colour |= {"info": "dim", "warning": "yellow", "error": "red"}
    table = Table("stage", "check", "finding", title="preflight", title_justify="left")
    for stage in result["stages"]:
        head = f"[{colour[stage['status']]}]{stage['name']} {stage['status']}[/] [dim]{stage['seconds']:.1f} s[/]"
        for i, f in enumerate(stage["findings"] or [{"check": "", "level": "info", "message": "", "hint": ""}]):
            text = f"[{colour[f['level']]}]{f['level']}[/] {escape(f['message'])}"
            text += f"\n[dim]→ {escape(f['hint'])}[/]" if f["hint"] else ""
            table.add_row(head if i == 0 else "", f["check"], text)
        table.add_section()
    console.print(table)
