"""The findings for the eye: a table that grows while the checks run, and stays as it is at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from eyas.progress import console, hushed

COLOURS = {"passed": "green", "warned": "yellow", "failed": "red", "skipped": "dim", "running": "cyan"}
COLOURS |= {"info": "dim", "warning": "yellow", "error": "red"}


def render(result: dict[str, Any]) -> None:
    """Print a result of `run_preflight` to stderr."""
    console.print(table(result["stages"]))


@contextmanager
def live() -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """A `watch` for `run_preflight` that shows the stages so far, in a terminal; elsewhere it does nothing. What
    the checked code would say itself stays unsaid: the findings tell it."""
    shown = Console(stderr=True)
    if console.quiet or not shown.is_terminal:
        with hushed():
            yield lambda report: None
        return
    with Live(console=shown, transient=True, vertical_overflow="crop") as screen, hushed():
        yield lambda report: screen.update(table(report, brief=True))


def table(stages: list[dict[str, Any]], brief: bool = False) -> Table:
    """A row for each finding; `brief`: for each stage, with its worst finding."""
    made = Table("stage", "check", "finding", title="preflight", title_justify="left")
    for stage in stages:
        status = stage["status"]
        head = f"[{COLOURS[status]}]{stage['name']}\n{status}[/] [dim]{stage['seconds']:.1f} s[/]"
        findings = stage["findings"]
        if brief:
            head = f"[{COLOURS[status]}]{stage['name']}  {status}[/]"
            worst = ("error", "warning", "info")
            findings = [f for level in worst for f in findings[::-1] if f["level"] == level][:1]
        for i, f in enumerate(findings or [{"check": "", "level": "info", "message": "", "hint": ""}]):
            text = f"[{COLOURS[f['level']]}]{f['level']}[/] {escape(f['message'])}"
            text += f"\n[dim]→ {escape(f['hint'])}[/]" if f["hint"] and not brief else ""
            made.add_row("" if i else head, f["check"], text)
        made.add_section()
    return made
