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
    stdlib: str

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
            try:  # it ends itself in time; this is for one that cannot
                process.wait((limit + 1) * (2 + len(facts.get("modules", []))))
            except subprocess.TimeoutExpired:
                pass
            finally:
                stop(process)
        lines: dict[str, Any] = {"returncode": process.returncode}
        for line in told.read_text().splitlines():
            lines |= json.loads(line)
        trace = Path(f"{told}.trace")
        lines["trace"] = trace.read_text(errors="replace") if trace.is_file() else ""
        lines |= {file.name: file.read_text(errors="replace") for file in said}
    return understand(lines, lines.get("stdlib", ""), limit)


def understand(lines: dict[str, Any], stdlib: str, limit: float) -> Reply:
    """The reply that a process's lines, trace and end come to."""
    ended = "result" in lines or "failed" in lines
    timed_out = not ended and "Timeout (" in lines["trace"]
    return Reply(
        lines.get("result"),
        lines.get("failed"),
        lines.get("importing"),
        limit if timed_out else lines.get("seconds", 0.0),
        lines["returncode"],
        timed_out,
        lines["stdout"],
        lines["stderr"],
        innermost(lines["trace"], stdlib),
        stdlib,
    )


def import_modules(
    python: str, base: str, modules: list[str], limit: float, folder: Path, **facts: Any
) -> dict[str, Reply]:
    """A reply for each module that had to be imported by itself, and of none that came along with another."""
    reply = ask(python, "modules", limit, folder, base=base, modules=modules, **facts)
    if reply.result is None:
        return {modules[0]: reply}
    if (forks := reply.result["forks"]) is None:
        apart = [import_modules(python, "", [m], limit, folder, **facts) for m in modules]
        return {m: r for replies in apart for m, r in replies.items()}
    for lines in forks.values():
        lines["stdout"], lines["stderr"] = reply.stdout + lines["stdout"], reply.stderr + lines["stderr"]
        lines["seconds"] += reply.result["seconds"]
    return {m: understand(lines, reply.stdlib, limit) for m, lines in forks.items()}


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
