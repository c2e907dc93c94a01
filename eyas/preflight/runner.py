"""Run the checks in order, go on after a failure, and say what was found."""

import json
import time
import traceback
from collections.abc import Callable
from typing import Any

from eyas.config import RunConfig
from eyas.errors import EyasError, UsageError
from eyas.preflight import (
    alignment,
    config,
    contracts,
    data,
    deploy,
    dry_run,
    engine,
    environment,
    features,
    identity,
    imports,
    model,
    schedule,
    sources,
    vocab,
)
from eyas.preflight.finding import Check, Finding, NotMade, Subject, error, info

CHECKS = [
    *environment.CHECKS, *imports.CHECKS, *contracts.CHECKS, *engine.CHECKS, *config.CHECKS, *sources.CHECKS,
    *schedule.CHECKS, *data.CHECKS, *features.CHECKS, *identity.CHECKS, *alignment.CHECKS, *vocab.CHECKS,
    *model.CHECKS, *dry_run.CHECKS, *deploy.CHECKS,
]  # fmt: skip
STAGES = list(dict.fromkeys(c.stage for c in CHECKS))
Report = list[dict[str, Any]]


def run_preflight(
    subject: RunConfig | Subject,
    stages: list[str] | None = None,
    skip: list[str] | None = None,
    strict: bool = False,
    budget: float | None = None,
    watch: Callable[[Report], None] = lambda report: None,
) -> dict[str, Any]:
    """Look at a run, as far as it is made, or at whatever else `subject` names; nothing is written there.

    `stages`: only these; `skip`: stages or checks to leave out; `strict`: warnings fail too; `budget`: seconds
    after which no check is started; `watch` is given the stages so far, after each check. Returns the JSON object
    of `eyas preflight`: {"ok", "seconds", "stages": [{"name", "status", "seconds", "findings": [{"check", "level",
    "message", "hint", "evidence"}]}]}; `ok` is False when any finding is an error. Raises UsageError for an
    unknown name.
    """
    stages, skip, names = stages or STAGES, skip or [], [c.name for c in CHECKS]
    for name in {*stages} - {*STAGES} | {*skip} - {*STAGES, *names}:
        raise UsageError(f"no preflight {name!r}", f"stages: {', '.join(STAGES)}; checks: {', '.join(names)}")
    if isinstance(subject, RunConfig):
        subject = Subject(subject)
    chosen = [c for c in CHECKS if c.stage in stages and c.about in subject.about]
    return run_checks(subject, chosen, skip, strict, budget, watch)


def run_checks(
    subject: Subject,
    checks: list[Check],
    skip: list[str],
    strict: bool = False,
    budget: float | None = None,
    watch: Callable[[Report], None] = lambda report: None,
) -> dict[str, Any]:
    """Run `checks` in the order given; see `run_preflight`."""
    begin, report = time.perf_counter(), []
    state: dict[str, str] = {}  # check -> "ran", "failed", "was skipped" or "left out"
    for name in dict.fromkeys(c.stage for c in checks):
        stage: dict[str, Any] = {"name": name, "status": "running", "seconds": 0.0, "findings": []}
        report.append(stage)
        watch(report)
        start, mine = time.perf_counter(), [c for c in checks if c.stage == name]
        for check in mine:
            if budget is not None and time.perf_counter() - begin > budget:
                found = [info(f"skipped: the time budget of {budget:g} s is spent", "give more with --budget")]
                state[check.name] = "was skipped"
            else:
                state[check.name], found = _run(subject, check, skip, state)
            stage["findings"] += _plain([{"check": check.name} | vars(f) for f in found])
            watch(report)
        levels = {f["level"] for f in stage["findings"]}
        status = "failed" if "error" in levels else "warned" if "warning" in levels else "passed"
        if {state[c.name] for c in mine} <= {"was skipped", "left out"}:
            status = "skipped"
        stage |= {"status": status, "seconds": round(time.perf_counter() - start, 3)}
        report[-1] = stage
        watch(report)
    bad = {"failed", "warned"} if strict else {"failed"}
    ok = all(stage["status"] not in bad for stage in report)
    return {"ok": ok, "seconds": round(time.perf_counter() - begin, 3), "stages": report}


def _plain(findings: Report) -> Report:
    """As JSON has it: NaN and infinity become text."""
    return json.loads(json.dumps(findings), parse_constant=str)


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
        return "was skipped", [info(f"skipped: {e}", e.hint)]
    except EyasError as e:
        found.append(error(e.message, e.hint))
    except Exception as e:  # a check that crashes has found something too
        at = traceback.extract_tb(e.__traceback__)[-1]
        text = f"the check itself failed: {type(e).__name__}: {e}"
        found.append(error(text, evidence={"at": f"{at.filename}:{at.lineno}"}))
    return "failed" if any(f.level == "error" for f in found) else "ran", found
