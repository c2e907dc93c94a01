"""The frame: order, needs, crashes, what is left out, and the JSON that comes out."""

import json
import time

import pytest

from eyas.config import RunConfig
from eyas.errors import EyasError, UsageError
from eyas.preflight.finding import Check, Finding, NotMade, Subject
from eyas.preflight.runner import run_checks, run_preflight
from eyas.preflight.table import live, render, table
from eyas.progress import console, say


def says(*findings: Finding):
    return lambda subject: iter(findings)


def crashes(subject):
    yield Finding("info", "so far so good")
    raise ZeroDivisionError("seven by nothing")


def refuses(subject):
    raise EyasError("store.json is missing", "extract again")


def is_not_made(subject):
    raise NotMade("stage extract has not run")


def run(*checks: Check, skip: tuple[str, ...] = ()):
    result = run_checks(Subject(RunConfig()), list(checks), list(skip))
    json.dumps(result, allow_nan=False)
    return result


def test_a_crash_is_an_error_finding_with_its_text_and_the_next_check_still_runs():
    result = run(Check("a", "one", (), crashes), Check("b", "one", (), says(Finding("info", "fine"))))
    first, second, third = result["stages"][0]["findings"]
    assert first["message"] == "so far so good"
    assert second["level"] == "error" and "ZeroDivisionError: seven by nothing" in second["message"]
    assert "test_runner.py:" in second["evidence"]["at"]
    assert third["message"] == "fine" and not result["ok"]


def test_an_eyas_error_keeps_its_hint():
    (finding,) = run(Check("a", "one", (), refuses))["stages"][0]["findings"]
    assert (finding["message"], finding["hint"]) == ("store.json is missing", "extract again")


def test_what_needs_a_failed_check_is_skipped_with_the_reason_and_so_on():
    result = run(
        Check("a", "one", (), refuses),
        Check("b", "two", ("a",), crashes),
        Check("c", "three", ("b",), crashes),
        Check("d", "three", (), says()),
    )
    assert [s["status"] for s in result["stages"]] == ["failed", "skipped", "passed"]
    assert result["stages"][1]["findings"][0]["message"] == "skipped: a failed"
    assert result["stages"][2]["findings"][0]["message"] == "skipped: b was skipped"


def test_an_input_that_is_not_made_yet_is_no_failure():
    result = run(Check("a", "one", (), is_not_made), Check("b", "two", ("a",), crashes))
    assert result["ok"] and {s["status"] for s in result["stages"]} == {"skipped"}


def test_warnings_warn_and_do_not_fail():
    result = run(Check("a", "one", (), says(Finding("warning", "odd"))), Check("b", "one", ("a",), says()))
    assert result["ok"] and result["stages"][0]["status"] == "warned"


def test_left_out_checks_do_not_stop_those_that_need_them():
    result = run(Check("a", "one", (), refuses), Check("b", "two", ("a",), says()), skip=("one",))
    assert [s["status"] for s in result["stages"]] == ["skipped", "passed"]


def test_numbers_that_json_lacks_become_text():
    result = run(
        Check("a", "one", (), says(Finding("info", "x", evidence={"nan": float("nan"), "l": [float("inf")]})))
    )
    assert result["stages"][0]["findings"][0]["evidence"] == {"nan": "NaN", "l": ["Infinity"]}


@pytest.mark.parametrize("chosen", [{"stages": ["dry-run"]}, {"skip": ["memroy"]}, {"stages": ["memory"]}])
def test_unknown_names_are_wrong_usage(chosen):
    with pytest.raises(UsageError, match="no preflight"):
        run_preflight(RunConfig(), **chosen)


def test_strict_fails_on_warnings():
    checks = [Check("a", "one", (), says(Finding("warning", "odd")))]
    assert run_checks(Subject(RunConfig()), checks, [])["ok"]
    assert not run_checks(Subject(RunConfig()), checks, [], strict=True)["ok"]


def test_no_check_starts_after_the_time_budget():
    def slow(subject):
        time.sleep(0.05)
        yield Finding("info", "done")

    checks = [Check("a", "one", (), slow), Check("b", "one", (), says()), Check("c", "two", (), says())]
    result = run_checks(Subject(RunConfig()), checks, [], budget=0.01)
    assert result["ok"] and [s["status"] for s in result["stages"]] == ["passed", "skipped"]
    said = [f["message"] for s in result["stages"] for f in s["findings"]]
    assert said == ["done", *["skipped: the time budget of 0.01 s is spent"] * 2]


def test_stages_can_be_watched_as_they_run():
    seen = []
    checks = [Check("a", "one", (), says(Finding("info", "x"))), Check("b", "two", (), says())]
    run_checks(
        Subject(RunConfig()), checks, [], watch=lambda r: seen.append([(s["name"], s["status"]) for s in r])
    )
    assert seen[0] == [("one", "running")] and seen[-1] == [("one", "passed"), ("two", "passed")]


def test_outside_a_terminal_nothing_is_drawn_while_checks_run(capsys):
    with live() as watch:
        watch([{"name": "one", "status": "running", "seconds": 0.0, "findings": []}])
        say("not to be heard")
    assert capsys.readouterr() == ("", "")


def test_the_live_table_shows_the_worst_finding_of_each_stage():
    found = [{"check": "a", "level": x, "message": x.upper(), "hint": ""} for x in ("info", "error", "warning")]
    shown = table([{"name": "one", "status": "running", "seconds": 0.0, "findings": found}], brief=True)
    with console.capture() as text:
        console.print(shown)
    assert "ERROR" in text.get() and "WARNING" not in text.get() and "INFO" not in text.get()


def test_the_table_shows_findings_and_hints_as_they_are():
    result = run(Check("a", "one", (), says(Finding("error", "layers [1] differ", "see [docs]"))))
    with console.capture() as shown:
        render(result)
    assert "layers [1] differ" in shown.get() and "→ see [docs]" in shown.get()
