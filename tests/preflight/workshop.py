"""Packages with a fault, made on purpose, and an interpreter to import them in."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eyas.preflight.finding import Subject
from eyas.preflight.runner import run_preflight

# A healthy package, that each fault changes one file of.
KIT = {
    "kit/__init__.py": "from kit.config import Config\n",
    "kit/config.py": "class Config:\n    def __init__(self, size, *, depth=1):\n        self.size = size\n",
    "kit/data/__init__.py": "",
    "kit/data/loader.py": "def make_batch(samples, max_len, pad=0):\n    return samples\n",
    "kit-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: kit\nVersion: 1.0\n",
    "kit-1.0.dist-info/top_level.txt": "kit\n",
}


@dataclass(frozen=True)
class Fault:
    """What is wrong, and what the preflight must say about it: check, level, parts of message and cure."""

    name: str
    check: str
    message: str
    cure: str
    script: str = "import kit\n"
    files: dict[str, str] = field(default_factory=dict)
    level: str = "error"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def bare_python(folder: Path) -> str:
    """An interpreter with nothing installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


@dataclass
class Workshop:
    """`work.check(script)` runs a preflight of it, with the packages of `work.site` importable."""

    folder: Path
    python: str

    @property
    def site(self) -> Path:
        return self.folder / "site"

    def check(self, script: str, stages: tuple[str, ...] = ("imports",), **options: Any) -> list[dict[str, Any]]:
        path = self.folder / "work" / "train.py"
        write(path.parent, {"train.py": script})
        subject = Subject(script=path, python=self.python, **options)
        result = run_preflight(subject, list(stages))
        return [f for stage in result["stages"] for f in stage["findings"]]


@pytest.fixture(scope="session")
def bare(tmp_path_factory) -> str:
    return bare_python(tmp_path_factory.mktemp("bare") / "env")


@pytest.fixture
def work(tmp_path, bare, monkeypatch) -> Workshop:
    made = Workshop(tmp_path, bare)
    write(made.site, KIT)
    monkeypatch.setenv("PYTHONPATH", str(made.site))
    return made


def of(findings: list[dict[str, Any]], *levels: str) -> list[dict[str, Any]]:
    return [f for f in findings if f["level"] in levels]


def expect(findings: list[dict[str, Any]], fault: Fault) -> None:
    """The fault is found, by its check, once, in words that name it and its cure; and nothing worse is said."""
    found = [f for f in of(findings, fault.level) if f["check"] == fault.check and fault.message in f["message"]]
    assert len(found) == 1, f"{fault.message!r} is not said once in {findings}"
    assert fault.cure in found[0]["hint"], found[0]
    worse = {"info": ("warning", "error"), "warning": ("error",), "error": ()}[fault.level]
    assert of(findings, *worse) == []


def names(faults: list[Fault]) -> Callable[..., Any]:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)
