"""What the user sees while waiting. Everything goes to stderr; stdout belongs to results."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

console = Console(stderr=True)


def say(text: str, style: str = "") -> None:
    """One line for a person to read; the text is shown as it is, whatever brackets the data brought."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    say(f"warning: {text}", "yellow")


@contextmanager
def hushed() -> Iterator[None]:
    """`say` and `warn` say nothing in here: what they would say is told in another way."""
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before


class _Rate(ProgressColumn):
    """Units a second, in the unit the task names."""

    def render(self, task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {task.fields['unit']}/s" if speed else "")


class Bar:
    """`bar.update(n, note)`: n more units are done."""

    def __init__(self, progress: Progress, task):
        self._progress, self._task = progress, task

    def update(self, n: float = 1, note: str = "") -> None:
        self._progress.update(self._task, advance=n, note=note)


@contextmanager
def bar(label: str, total: float, unit: str = "") -> Iterator[Bar]:
    """A progress bar with rate and time left; silent when stderr is not a terminal or --quiet is given."""
    hidden = console.quiet or not sys.stderr.isatty()
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console, disable=hidden) as progress:
        yield Bar(progress, progress.add_task(label, total=total, unit=unit, note=""))
