"""Imports: does every module and name that a training script takes from elsewhere exist where it will run, and do
its calls fit? The script is read, never run; each module is imported in a process of its own.
"""

import difflib
import sys
from collections.abc import Iterator
from typing import Any

from eyas.errors import EyasError
from eyas.preflight import contracts, failures
from eyas.preflight.calls import misfit, written
from eyas.preflight.child import Reply, ask
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.preflight.packages import environment
from eyas.preflight.resolve import rank, resolved
from eyas.preflight.script import Use, folder_of, scripts, uses

MEMORY = 2 << 30  # bytes an import may take without a word


def script_is_python(s: Subject) -> Iterator[Finding]:
    assert s.script is not None
    if not s.script.is_file():
        raise EyasError(f"there is no script {s.script}", "give the path of a Python file")
    reply = ask(s.python, "script", s.import_limit, path=str(s.script))
    if reply.result is None:
        raise EyasError(f"{s.python} {reply.ending} when asked about the script", reply.stderr.strip()[-500:])
    if bad := reply.result.get("message"):
        line, version = reply.result["line"], environment(s).version
        text = f"{s.script}:{line}: not valid for Python {version}: {bad}: `{reply.result['text']}`"
        yield error(text, f"mend line {line}, or run the script with a Python that knows this", {"line": line})
        return
    try:
        read = scripts(s)
    except SyntaxError as e:
        text = (
            f"{e.filename}:{e.lineno}: Python {sys.version.split()[0]}, which runs eyas, does not read `{e.text}`"
        )
        yield error(text.replace("\n", ""), "mend the line, or run eyas with as new a Python as the script")
        return
    for script in read[:1]:
        for line, text in script.relative:
            package = (script.file.resolve().parent / "__init__.py").is_file()
            module = ".".join(script.file.resolve().relative_to(folder_of(s)).with_suffix("").parts)
            evidence = {"file": str(script.file), "line": line}
            if package:
                hint = f"run `python -m {module}` in {folder_of(s)}"
                yield warning(f"{script.file}:{line}: `{text}` works only as part of a package", hint, evidence)
            else:
                hint = f"write `{text.replace('from .', 'from ', 1).replace('from  import', 'import', 1)}`"
                yield error(f"{script.file}:{line}: a script has no package: `{text}` fails", hint, evidence)
    count = len({use.module for use in uses(s)})
    others = f" and {len(read) - 1} modules beside it" if len(read) > 1 else ""
    yield info(
        f"{s.script}{others}: {count} modules are imported", evidence={"files": [str(r.file) for r in read]}
    )


def nothing_hides_a_package(s: Subject) -> Iterator[Finding]:
    """A file beside the script comes before every installed package of that name."""
    env, folder = environment(s), folder_of(s)
    for use in first_uses(s):
        top = use.module.split(".")[0]
        for beside in (folder / f"{top}.py", folder / top / "__init__.py"):
            known = f"the installed {env.dist_of(top)}" if env.dist_of(top) else "Python's own module"
            if beside.is_file() and (env.dist_of(top) or top in env.stdlib):
                evidence = {"file": str(beside), "module": use.module}
                text = f"{use.at}: `{top}` is {beside.relative_to(folder)} beside the script, which hides {known}"
                yield error(text, f"rename {beside.name if beside.stem == top else top}", evidence)


def first_uses(s: Subject) -> list[Use]:
    """The first import of each module, in the order in which modules are tried."""
    found: dict[str, Use] = {}
    for use in uses(s):
        if use.kind != "attribute":
            found.setdefault(use.module, use)
    return sorted(found.values(), key=lambda u: rank(u.module))


def judge(s: Subject, use: Use, fault: str, message: str, hint: str, **evidence: Any) -> Iterator[Finding]:
    """The finding for a fault at `use`: an error, unless the script goes on without. fault: the "package" is not
    installed; a module or "name" is not in it; it is "broken", or so that no `except` catches it ("fatal")."""
    where, level, note = use.where, "error", ""
    if where.need == "fallback" and (use.file, where.guard) not in resolved(s).failed_guards:
        return
    if where.need == "conditional":
        level, note = ("warning" if fault == "package" else "error"), f" (only if `{where.condition}`)"
    elif where.need == "guarded" and fault == "fatal":
        note = " (the `except` around it does not catch this)"
    elif where.need == "guarded":
        level, note = ("warning" if fault == "broken" else "info"), " (the script goes on without it)"
    elif where.need == "typing":
        level, note = "info", " (only for type checkers)"
    elif where.function:
        note = f" (fails only when {where.function}() runs)"
    evidence |= {"file": str(use.file), "line": use.line, "name": use.name, "python": s.python}
    yield Finding(level, f"{use.at}: {message}{note}", hint, evidence)


def modules_import(s: Subject) -> Iterator[Finding]:
    done, said = resolved(s), set()
    for use in first_uses(s):
        reply, known = done.replies[use.module], done.modules.get(use.module.split(".")[0])
        if reply.result is None:
            if known and use.module not in known:
                yield from no_such_module(s, use)
            if (reply.fault, reply.importing) not in said:  # what one package needs, each of its modules needs
                said.add((reply.fault, reply.importing))
                yield from broken(s, use, reply)
            continue
        for finding in effects_of(use, reply):
            key = (use.module.split(".")[0], finding.level, finding.message.rpartition(": ")[2])
            if key not in said:  # what a package does on import, it does for each of its modules
                said.add(key)
                yield finding
    worked = [m for m, r in done.replies.items() if r.result is not None]
    slowest = max((r.seconds, m) for m, r in done.replies.items()) if done.replies else (0.0, "")
    seconds = {m: round(r.seconds, 2) for m, r in done.replies.items()}
    text = f"{len(worked)} of {len(seconds)} modules import, the slowest in {slowest[0]:.1f} s ({slowest[1]})"
    yield info(text, evidence={"seconds": seconds, "python": s.python})


def no_such_module(s: Subject, use: Use) -> Iterator[Finding]:
    done, top, dist = resolved(s), use.module.split(".")[0], source_of(s, use)
    wanted = sorted({u.chain[0] for u in uses(s) if u.module == use.module and u.chain})
    cures = [f"`from {done.places[n][0]} import {n}`" for n in wanted if n in done.places]
    close = difflib.get_close_matches(use.module, done.modules[top], 3)
    hint = "; ".join(cures) or (f"it has {', '.join(close)}" if close else "")
    hint = "; ".join(filter(None, [hint, contracts.remedy(s, use)]))
    yield from judge(s, use, "name", f"{dist} has no module `{use.module}`", hint, wanted=wanted, modules=close)


def broken(s: Subject, use: Use, reply: Reply) -> Iterator[Finding]:
    env, known = environment(s), resolved(s).modules
    missing, top = (reply.failed or {}).get("missing"), use.module.split(".")[0]
    kind = reply.failed["type"] if reply.failed else "SystemExit"  # a crash is caught as little
    if reply.failed and reply.failed["type"] == "ModuleNotFoundError" and missing == top:
        text, hint = (
            f"`{top}` is not installed for {s.python}",
            f"`{s.python} -m pip install {contracts.wanted(s, top)}`",
        )
        yield from judge(s, use, "package", text, hint)
    elif missing and missing in (use.module, reply.importing) and missing not in known.get(top, [missing]):
        return  # `no_such_module` has said so
    else:
        text, hint = failures.explain(env, use.module, reply)
        evidence = {"stderr": reply.stderr[-1000:], "at": reply.at, "returncode": reply.returncode}
        by_name = {"ImportError", "ModuleNotFoundError"} | (set() if use.where.imports_only else {kind})
        fault = "broken" if kind in by_name and kind != "SystemExit" else "fatal"
        yield from judge(s, use, fault, text, hint, failure=reply.failed, **evidence)


def source_of(s: Subject, use: Use) -> str:
    """Where a module comes from, with its version."""
    env, top = environment(s), use.module.split(".")[0]
    return env.dist_of(top) or (f"Python {env.version}" if top in env.stdlib else f"{top} beside the script")


def effects_of(use: Use, reply: Reply) -> Iterator[Finding]:
    assert reply.result is not None
    found = reply.result["effects"]
    evidence = {"effects": found, "file": str(use.file), "line": use.line, "module": use.module}
    at = f"{use.at}: importing `{use.module}`"
    later = "do it in a function, after the script has set up its devices and workers"
    if found.get("cuda") or found.get("gpu"):
        text = f"{at} takes GPU memory: {found.get('gpu_memory', 0) / 1e9:.2f} GB and a CUDA context"
        yield warning(text, later, evidence)
    if found["memory"] > MEMORY:
        yield warning(f"{at} takes {found['memory'] / 1e9:.1f} GB of memory", later, evidence)
    if found["threads"]:
        text = f"{at} starts threads that keep the process alive: {', '.join(found['threads'])}"
        yield warning(text, "start them as daemons, or when they are needed", evidence)
    if found.get("processes"):
        yield warning(f"{at} starts {len(found['processes'])} processes", later, evidence)
    if "devices" in found:
        text = f"{at} sets CUDA_VISIBLE_DEVICES to {found['devices']!r}"
        yield warning(text, "which GPUs are used is the launcher's to say", evidence)
    if "folder" in found:
        yield warning(f"{at} changes the working folder to {found['folder']}", "use full paths instead", evidence)
    if reply.stdout.strip():
        text, hint = (
            f"{at} prints: {first_line(reply.stdout)}",
            "results on stdout get mixed with this: use logging",
        )
        yield warning(text, hint, evidence | {"stdout": reply.stdout[:2000]})
    if reply.stderr.strip():
        text = f"{at} writes to stderr: {first_line(reply.stderr)}"
        yield info(text, evidence=evidence | {"stderr": reply.stderr[:2000]})
    for text in reply.result["deprecated"]:
        yield warning(
            f"{at}: deprecated: {first_line(text)}", "follow what it says before it is removed", evidence
        )


def first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200]


def names_are_there(s: Subject) -> Iterator[Finding]:
    done = resolved(s)
    seen, faults, old = set(), {}, {}
    for use in uses(s):
        found = done.answer(use)
        if not use.chain or found is None:
            continue
        seen.add((use.file, use.line, use.chain))
        if found.get("missing"):
            faults.setdefault((use.file, found["holder"], found["missing"]), []).append((use, found))
        for text in found.get("deprecated", []):
            old.setdefault((use.name, first_line(text)), use)
    for same in faults.values():  # said once, at the import or the first use
        use, found = same[0]
        yield from judge(s, use, "name", *absent_name(s, use, found), lines=[u.line for u, _ in same])
    for (name, text), use in old.items():
        evidence = {"file": str(use.file), "line": use.line, "name": name}
        yield warning(
            f"{use.at}: `{name}` is deprecated: {text}", "follow what it says before it is removed", evidence
        )
    yield info(f"{len(seen)} uses of names were looked up in the installed modules")


def absent_name(s: Subject, use: Use, found: dict[str, Any]) -> tuple[str, str]:
    name, holder, done = found["missing"], found["holder"], resolved(s)
    dist = source_of(s, use)
    text = f"`{holder}` ({dist}) exposes nothing named `{name}`"
    if not found["is_module"]:
        return text, contracts.remedy(s, use) or f"see `{s.python} -m pydoc {holder}`"
    if found.get("submodule"):
        return f"`{holder}.{name}` is a module that nothing imports", f"add `import {holder}.{name}`"
    close = difflib.get_close_matches(name, found["names"], 3)
    where = [m for m in done.places.get(name, []) if m != holder]
    hint = f"it is in {where[0]}: `from {where[0]} import {name}`" if where else ""
    hint = hint or (f"did you mean {' or '.join(close)}?" if close else "")
    if not hint and holder.split(".")[0] in environment(s).stdlib:
        hint = f"this Python no longer has it, or does not have it yet: see `{s.python} -m pydoc {holder}`"
    return text, "; ".join(filter(None, [hint, contracts.remedy(s, use)]))


def calls_fit(s: Subject) -> Iterator[Finding]:
    done, unknown, count = resolved(s), 0, 0
    for use in uses(s):
        found = done.answer(use)
        if use.call is None or found is None or found.get("missing"):
            continue
        if found["params"] is None:
            unknown += 1
            continue
        count += 1
        parameters = [(name, kind, required) for name, kind, required in found["params"]]
        if (fault := misfit(parameters, use.call)) is None:
            continue
        name, signature = use.chain[-1] if use.chain else use.module, written(parameters)
        if found["ignores_unknown"] and "no parameter" in fault:
            yield warning(f"{use.at}: `{use.name}` {fault}: it is ignored without a word", f"{name}{signature}")
            continue
        dist = source_of(s, use)
        told = [f"in {dist} it is `{name}{signature}`", contracts.remedy(s, use, called=True)]
        hint, text = "; ".join(filter(None, told)), f"`{use.name}` {fault}"
        yield from judge(s, use, "name", text, hint, signature=signature, call=use.text)
    yield info(f"{count} calls were held against signatures, {unknown} have none", evidence={"unknown": unknown})


CHECKS = [
    Check("script", "imports", ("python",), script_is_python, "script"),
    Check("shadows", "imports", ("script",), nothing_hides_a_package, "script"),
    Check("modules", "imports", ("script",), modules_import, "script"),
    Check("names", "imports", ("script",), names_are_there, "script"),
    Check("calls", "imports", ("script",), calls_fit, "script"),
]
