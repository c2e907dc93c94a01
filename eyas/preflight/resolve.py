"""Import every module that a script asks for, each in a process of its own, and look up the names it takes."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eyas.preflight.calls import read_signature
from eyas.preflight.child import Reply, ask, import_modules
from eyas.preflight.contract import read_installed
from eyas.preflight.finding import Subject, once
from eyas.preflight.packages import environment
from eyas.preflight.script import Use, folder_of, uses

ORDER = ("config", "model", "data")  # modules are tried in this order: later ones need the earlier


@dataclass
class Resolved:
    """What became of each module, and of each (module, chain of names)."""

    replies: dict[str, Reply] = field(default_factory=dict)
    names: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)  # missing name -> modules that have it
    modules: dict[str, list[str]] = field(default_factory=dict)  # package that fails -> its modules
    asked: set[str] = field(default_factory=set)  # modules that import statements name
    failed_guards: set[tuple[Path, int]] = field(default_factory=set)

    def answer(self, use: Use) -> dict[str, Any] | None:
        return self.names.get(owner(use, self.asked))

    def imports(self, use: Use) -> bool:
        return self.replies[owner(use, self.asked)[0]].result is not None


@once
def resolved(s: Subject) -> Resolved:
    """Import every module once, and look up every name."""
    done, env, wanted = Resolved(), environment(s), uses(s)
    asked = done.asked = {use.module for use in wanted if use.kind != "attribute"}
    names: dict[str, list[list[str]]] = {}
    for use in wanted:
        if use.chain:
            module, chain = owner(use, asked)
            known = names.setdefault(module, [])
            if list(chain) not in known:
                known.append(list(chain))
    froms = [[u.module, u.chain[0]] for u in wanted if u.kind == "from"]
    job = {"names": names, "froms": froms, "all": sorted(asked), "script": str(s.script)}
    groups: dict[str, list[str]] = {}
    for module in sorted(asked | set(names), key=rank):
        top = module.split(".")[0]
        groups.setdefault("" if top in env.stdlib else top, []).append(module)

    def work(top: str) -> None:
        group = groups[top]
        found = import_modules(s.python, top, group, s.import_limit, folder_of(s), **job)
        for module, reply in found.items():
            done.replies.setdefault(module, reply)
            for name, answer in (reply.result or {"answers": {}})["answers"].items():
                done.replies.setdefault(name, reply)
                for chain, about in zip(names.get(name, []), answer["names"], strict=True):
                    done.names[name, tuple(chain)] = about
            for absent in (reply.result or {"absent": []})["absent"]:
                failed = {"type": "ModuleNotFoundError", "message": "", "missing": absent, "at": None}
                done.replies.setdefault(absent, replace(reply, result=None, failed=failed, importing=absent))
        for module in group:  # whatever is below a package that fails, fails with it
            above = (r for r in found.values() if r.result is None and f"{module}.".startswith(f"{r.importing}."))
            if module not in done.replies:
                done.replies[module] = next(above, next(iter(found.values())))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(work, groups))
    read_what_fails(s, done, names)
    locate(s, done)
    for use in wanted:
        absent = (done.answer(use) or {}).get("missing")
        if use.where.guard and use.kind != "attribute" and (not done.imports(use) or absent):
            done.failed_guards.add((use.file, use.where.guard))
    return done


def rank(module: str) -> tuple[int, int, str]:
    order = next((i for i, word in enumerate(ORDER) if word in module), len(ORDER))
    return (order, module.count("."), module)


def owner(use: Use, asked: set[str]) -> tuple[str, tuple[str, ...]]:
    """`import a.b` and then `a.b.f`: the name f of module a.b."""
    for i in range(len(use.chain), 0, -1):
        if use.kind == "attribute" and (module := ".".join((use.module, *use.chain[:i]))) in asked:
            return module, use.chain[i:]
    return use.module, use.chain


def read_what_fails(s: Subject, done: Resolved, names: dict[str, list[list[str]]]) -> None:
    """Of packages that are there and do not import, look up names in their files: one run shows all faults."""
    failing = {m.split(".")[0] for m, reply in done.replies.items() if reply.result is None}
    for top in failing:
        mine = tuple(m for m in done.replies if m.split(".")[0] == top)
        if environment(s).modules.get(top) is None:
            continue
        found = read_installed(s.python, top, mine, folder_of(s), s.import_limit)
        for module in mine if found else ():
            for chain in names.get(module, []) if module in found.modules else []:
                entry = found.find(module, tuple(chain))
                if entry is None:
                    here = list(found.modules[module])
                    answer = {"missing": chain[0], "holder": module, "is_module": True, "names": here}
                elif entry["kind"] == "unknown":
                    continue
                else:
                    signature = entry.get("signature")
                    answer = {"params": read_signature(signature) if signature else None, "ignores_unknown": False}
                done.names.setdefault((module, tuple(chain)), answer)


def locate(s: Subject, done: Resolved) -> None:
    """Read the files of packages that lack something, to say where it is instead."""
    lost: dict[str, set[str]] = {}
    for use in uses(s):
        answer = done.answer(use)
        if use.chain and (answer.get("missing") if answer else not done.imports(use)):
            lost.setdefault(use.module.split(".")[0], set()).add((answer or {}).get("missing") or use.chain[0])
    for module, reply in done.replies.items():
        if reply.result is None:
            lost.setdefault(module.split(".")[0], set())
    for top, names in lost.items():
        if environment(s).modules.get(top):
            reply = ask(s.python, "locate", s.import_limit, folder_of(s), top=top, names=sorted(names))
            if reply.result:
                done.modules[top] = reply.result["modules"]
                done.places |= {n: best(places) for n, places in reply.result["found"].items() if places}


def best(places: list[list[str]]) -> list[str]:
    """Modules that have a name: those that define it first, public and short ones before others."""
    hidden = [any(part.startswith("_") for part in module.split(".")) for module, _ in places]
    ranked = sorted(
        zip(hidden, places, strict=True), key=lambda p: (p[0], p[1][1] == "import", p[1][0].count("."))
    )
    return [module for _, (module, _) in ranked]
