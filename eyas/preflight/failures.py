"""Why an import fails, in words, and what to do about it."""

import re
import signal

from eyas.preflight.child import Reply
from eyas.preflight.packages import Environment


def explain(env: Environment, module: str, reply: Reply) -> tuple[str, str]:
    """(what was found, the cure) for an import that gave no module."""
    part, dist = reply.importing or module, env.dist_of(module.split(".")[0]) or module.split(".")[0]
    of = f" (imported as part of `{module}`)" if part != module else ""
    if reply.failed is None:
        at = f" at {reply.at}" if reply.at else ""
        if reply.timed_out:
            text = f"importing `{part}` hangs: not done after {reply.seconds:.0f} s,{at or ' place unknown'}{of}"
            return text, "move that line into a function; if it is only slow, raise --import-limit"
        if reply.returncode < 0:
            text = f"importing `{part}` crashes the interpreter: it {reply.ending}{at}{of}"
            if reply.returncode == -signal.SIGKILL:
                return text, "only the system kills like this, for want of memory: see `main_memory`"
            built = f"torch {env.version_of('torch')}" if env.version_of("torch") else f"Python {env.version}"
            return text, f"reinstall {dist} as built for {built}: compiled code that does not fit crashes so"
        return f"importing `{part}` {reply.ending}{at}{of}", f"look at {dist}: a module must not end the process"
    kind, message, missing = reply.failed["type"], reply.failed["message"], reply.failed["missing"]
    place = reply.failed["at"]
    at = f" at {place[0]}:{place[1]}" if place else ""
    first = message.strip().splitlines()[0] if message.strip() else ""
    if kind == "ModuleNotFoundError" and missing and "." in missing and env.provider(missing.split(".")[0]):
        other = env.dist_of(missing.split(".")[0])
        text = (
            f"importing `{part}` fails: {dist} wants the module `{missing}`, which {other} does not have{at}{of}"
        )
        return text, fitting(env, module, missing, dist, other)
    if kind == "ModuleNotFoundError":
        text = f"importing `{part}` needs `{missing}`, which is not installed (asked for{at}){of}"
        return text, f"`{env.executable} -m pip install {missing.split('.')[0] if missing else ''}`"
    if kind == "ImportError" and (
        lost := re.search(r"cannot import name '(\w+)' from (?:partially init\S+ module )?'([\w.]+)'", first)
    ):
        name, other = lost.groups()
        if "circular" in first:
            text = f"importing `{part}` goes round in a circle: `{name}` of `{other}` is not there yet{at}{of}"
            return text, f"import `{other}` inside the function that needs it"
        owner = env.dist_of(other.split(".")[0]) or other
        text = (
            f"importing `{part}` fails: {dist} wants `{name}` from `{other}`, which {owner} does not have{at}{of}"
        )
        return text, fitting(env, module, other, dist, owner)
    if kind == "SystemExit":
        return (
            f"importing `{part}` calls sys.exit({reply.failed['code']}){at}{of}",
            "let it do so only under `if __name__ == '__main__':`",
        )
    if kind == "SyntaxError":
        text = f"importing `{part}`: Python {env.version} cannot read it: {first}{of}"
        return text, f"{dist} needs another Python, or its files are damaged: reinstall it"
    if (".so" in first and "cannot open" in first) or "undefined symbol" in first or "GLIBC" in first:
        text = f"importing `{part}` fails in compiled code: {first}{of}"
        return text, f"reinstall {dist} as built for torch {env.version_of('torch') or '(none is installed)'}"
    return (
        f"importing `{part}` raises {kind}: {first}{at}{of}",
        f"mend what it says; `{env.executable} -c 'import {part}'` shows all of it",
    )


def fitting(env: Environment, module: str, other: str, dist: str, owner: str) -> str:
    """How to get versions of two packages that fit."""
    asked = env.requirement(module.split(".")[0], other.split(".")[0])
    if asked and not asked.isidentifier():
        return f"{dist} asks for {asked}: `{env.executable} -m pip install '{asked}'`"
    name, version = owner.split(" ") if " " in owner else (owner, "")
    older = f": perhaps `{env.executable} -m pip install '{name}<{version.split('.')[0]}'`" if version else ""
    return f"{dist} was made for another {name}{older}"
