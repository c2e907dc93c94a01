"""Ask an interpreter something in a process of its own, so that a crash, a hang or a print is an answer too."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eyas.errors import EyasError

PROBE = Path(__file__).with_name("_probe.py")


@dataclass(frozen=True)
class Reply:
    """`result` when the job was done; else `failed` (the exception), or only how the process ended."""

    result: dict[str, Any] | None
    failed: dict[str, Any] | None
    importing: str | None
    seconds: float
    returncode: int
    timed_out: bool
    stdout: str
    stderr: str
    at: str

    @property
    def ending(self) -> str:
        """How the process ended, in words, when it gave no answer."""
        if self.timed_out:
            return "did not end in time"
        if self.returncode < 0:
            name = signal.Signals(-self.returncode).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"ended the process with exit code {self.returncode}"

    @property
    def fault(self) -> str:
        """Why there is no result, in a line."""
        if self.failed:
            return f"{self.failed['type']}: {self.failed['message'].strip().partition(chr(10))[0]}"
        return f"it {self.ending}" + (f" at {self.at}" if self.at else "")


def ask(python: str, job: str, limit: float, folder: Path = Path(os.devnull), **facts: Any) -> Reply:
    """Have `python` do one of the jobs of `_probe.py` within `limit` seconds, with `folder` first on its path."""
    with tempfile.TemporaryDirectory(prefix="eyas-probe-") as temporary:
        asked, told = Path(temporary, "job.json"), Path(temporary, "told.jsonl")
        asked.write_text(json.dumps({"job": job, "limit": limit} | facts))
        told.touch()
        command = [python, str(PROBE), str(asked), str(told), str(folder)]
        # Nothing is written beside the user's files, not even bytecode.
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
        env.pop("PYTHONSAFEPATH", None)  # the probe counts on its folder's place on sys.path
        said = [Path(temporary, name) for name in ("stdout", "stderr")]
        with said[0].open("wb") as stdout, said[1].open("wb") as stderr:  # files: pipes may outlive the process
            process = start(command, env, stdout, stderr)
            try:
                process.wait(limit + 1)  # its own traceback comes at `limit`
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                stop(process)
        output, complaints = (file.read_text(errors="replace") for file in said)
        lines: dict[str, Any] = {}
        for line in told.read_text().splitlines():
            lines |= json.loads(line)
        trace = Path(f"{told}.trace")
        at = innermost(trace.read_text(errors="replace") if trace.is_file() else "", lines.get("stdlib", ""))
    done = {key: lines.get(key) for key in ("result", "failed", "importing")}
    seconds = lines.get("seconds", limit if timed_out else 0.0)
    return Reply(
        done["result"],
        done["failed"],
        done["importing"],
        seconds,
        process.returncode,
        timed_out,
        output,
        complaints,
        at,
    )


def start(command: list[str], env: dict[str, str], stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env, start_new_session=True
        )
    except OSError as e:
        text = f"the interpreter {command[0]} cannot be started: {e.strerror}"
        raise EyasError(text, "give the path of a Python, such as `--python .venv/bin/python`") from e


def stop(process: subprocess.Popen) -> None:
    """End the child and whatever it started: it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def innermost(trace: str, stdlib: str) -> str:
    """`file:line` of the innermost frame of a faulthandler trace that is neither Python's own nor the probe's."""
    for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace):
        own = file.startswith("<") or file == str(PROBE) or (file.startswith(stdlib) and "-packages" not in file)
        if not own:
            return f"{file}:{line}"
    return ""
