"""Run the checks in order, go on after a failure, and say what was found."""

import json
import time
import traceback
from typing import Any

from rich.markup import escape
from rich.table import Table

from eyas.config import RunConfig
from eyas.errors import EyasError, UsageError
from eyas.preflight import alignment, contracts, dry_run, engine, environment, features, imports, model
from eyas.preflight.finding import Check, Finding, NotMade, Subject, error, info
from eyas.progress import console

CHECKS = [*environment.CHECKS, *imports.CHECKS, *contracts.CHECKS, *engine.CHECKS]
CHECKS += [*features.CHECKS, *alignment.CHECKS, *model.CHECKS, *dry_run.CHECKS]
STAGES = list(dict.fromkeys(c.stage for c in CHECKS))
COLOURS = {"passed": "green", "warned": "yellow", "failed": "red", "skipped": "dim"}
COLOURS |= {"info": "dim", "warning": "yellow", "error": "red"}


def run_preflight(
    subject: RunConfig | Subject, stages: list[str] | None = None, skip: list[str] | None = None
) -> dict[str, Any]:
    """Look at a run, as far as it is made, or at whatever else `subject` names; nothing is written there.

    `stages`: only these; `skip`: stages or checks to leave out. Returns the JSON object of `eyas preflight`:
    {"ok", "seconds", "stages": [{"name", "status", "seconds", "findings": [{"check", "level", "message", "hint",
    "evidence"}]}]}; `ok` is False when any finding is an error. Raises UsageError for an unknown name.
    """
    stages, skip, names = stages or STAGES, skip or [], [c.name for c in CHECKS]
    for name in {*stages} - {*STAGES} | {*skip} - {*STAGES, *names}:
        raise UsageError(f"no preflight {name!r}", f"stages: {', '.join(STAGES)}; checks: {', '.join(names)}")
    if isinstance(subject, RunConfig):
        subject = Subject(subject)
    chosen = [c for c in CHECKS if c.stage in stages and c.about in subject.about]
    return run_checks(subject, chosen, skip)


def run_checks(subject: Subject, checks: list[Check], skip: list[str]) -> dict[str, Any]:
    """Run `checks` in the order given; see `run_preflight`."""
    begin, report = time.perf_counter(), []
    state: dict[str, str] = {}  # check -> "ran", "failed", "was skipped" or "left out"
    for stage in dict.fromkeys(c.stage for c in checks):
        start, findings = time.perf_counter(), []
        mine = [c for c in checks if c.stage == stage]
        for check in mine:
            state[check.name], found = _run(subject, check, skip, state)
            findings += [{"check": check.name} | vars(f) for f in found]
        findings = json.loads(json.dumps(findings), parse_constant=str)  # NaN and infinity become text
        levels = {f["level"] for f in findings}
        status = "failed" if "error" in levels else "warned" if "warning" in levels else "passed"
        if {state[c.name] for c in mine} <= {"was skipped", "left out"}:
            status = "skipped"
        seconds = round(time.perf_counter() - start, 3)
        report.append({"name": stage, "status": status, "seconds": seconds, "findings": findings})
    ok = all(stage["status"] != "failed" for stage in report)
    return {"ok": ok, "seconds": round(time.perf_counter() - begin, 3), "stages": report}


def _run(subject: Subject, check: Check, skip: list[str], state: dict[str, str]) -> tuple[str, list[Finding]]:
    """State and findings of one check."""
    if check.name in skip or check.stage in skip:
        return "left out", [info("skipped: asked for")]
    for need in check.needs:
        if state.get(need) in ("failed", "was skipped"):
            return "was skipped", [info(f"skipped: {need} {state[need]}")]
    found: list[Finding] = []
    try:
        found.extend(check.run(subject))
    except NotMade as e:
        return "was skipped", [info(f"skipped: {e}", "make it with `eyas run CONFIG`")]
    except EyasError as e:
        found.append(error(e.message, e.hint))
    except Exception as e:  # a check that crashes has found something too
        at = traceback.extract_tb(e.__traceback__)[-1]
        text = f"the check itself failed: {type(e).__name__}: {e}"
        found.append(error(text, evidence={"at": f"{at.filename}:{at.lineno}"}))
    return "failed" if any(f.level == "error" for f in found) else "ran", found


def render(result: dict[str, Any]) -> None:
    """Print a result of `run_preflight` to stderr."""
    table = Table("stage", "check", "finding", title="preflight", title_justify="left")
    for stage in result["stages"]:
        status = stage["status"]
        head = f"[{COLOURS[status]}]{stage['name']}\n{status}[/] [dim]{stage['seconds']:.1f} s[/]"
        for i, f in enumerate(stage["findings"]):
            text = f"[{COLOURS[f['level']]}]{f['level']}[/] {escape(f['message'])}"
            text += f"\n[dim]→ {escape(f['hint'])}[/]" if f["hint"] else ""
            table.add_row("" if i else head, f["check"], text)
        table.add_section()
    console.print(table)
