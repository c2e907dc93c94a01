"""A contract: what a package's files promise to whoever imports it, read without importing: public names,
signatures, notes beside parameters. One JSON file for each release; `recorded/` holds those of real ones.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from eyas.errors import EyasError
from eyas.preflight.calls import misfit, read_signature
from eyas.preflight.child import ask
from eyas.preflight.script import Use

RECORDED = Path(__file__).with_name("recorded")


@dataclass(frozen=True)
class Contract:
    """Names of one release. `of`: the modules recorded; nothing is known of others."""

    package: str
    version: str
    of: tuple[str, ...]
    modules: dict[str, dict[str, dict[str, Any]]]

    def covers(self, module: str) -> bool:
        return module + ".__init__" in self.of or any((module + ".").startswith(p + ".") for p in self.of)

    def find(self, module: str, chain: tuple[str, ...] = (), depth: int = 8) -> dict[str, Any] | None:
        """What a name is. None: the contract says it is not there; kind "unknown": the contract says nothing."""
        unknown = {"kind": "unknown"}
        while chain and f"{module}.{chain[0]}" in self.modules:
            module, chain = f"{module}.{chain[0]}", chain[1:]
        if module not in self.modules:
            return None if self.covers(module) else unknown
        if not chain:
            return {"kind": "module"}
        names = self.modules[module]
        entry = names.get(chain[0])
        if entry is None:
            return unknown if "*" in names or chain[0].startswith("_") else None
        if entry["kind"] == "import":
            return self.find(*self.split(entry["from"], chain[1:]), depth - 1) if depth else unknown
        if len(chain) > 1:
            method = entry.get("methods", {}).get(chain[1])
            return {"kind": "function"} | method if method and len(chain) == 2 else unknown
        return entry

    def split(self, name: str, more: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...]]:
        """A dotted name as the longest module that is recorded and the rest; if none is, as package and rest."""
        path = name.split(".")
        at = next((i for i in range(len(path), 0, -1) if ".".join(path[:i]) in self.modules), 1)
        return ".".join(path[:at]), (*path[at:], *more)

    def look_up(self, name: str) -> dict[str, Any] | None:
        return self.find(*self.split(name))

    def lacks(self, use: Use) -> bool:
        """Would this use have failed with this release?"""
        entry = self.find(use.module, use.chain)
        if entry is None:
            return True
        signature = entry.get("signature")
        return bool(use.call and signature and misfit(read_signature(signature), use.call))


@lru_cache
def load(folder: Path) -> tuple[Contract, ...]:
    """Every contract in a folder, oldest first. Raises EyasError for a file that is none."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            raw = json.loads(file.read_text())
            found.append(Contract(raw["package"], raw["version"], tuple(raw["of"]), raw["modules"]))
        except (ValueError, KeyError, TypeError) as e:
            raise EyasError(f"{file} is no contract: {e!r}", "make it with `eyas contracts record PACKAGE`") from e
    return tuple(sorted(found, key=lambda c: Version(c.version)))


def read_installed(python: str, package: str, of: tuple[str, ...], folder: Path, limit: float = 60.0) -> Contract:
    """The contract of what is installed for an interpreter. No modules when there is none."""
    reply = ask(python, "record", limit, folder, top=package, of=list(of))
    if reply.result is None:
        raise EyasError(f"the files of {package} cannot be read by {python}: {reply.fault}")
    return Contract(package, reply.result["version"] or "0", of, reply.result["modules"])


def write(contract: Contract, file: Path) -> None:
    """One line for each module, so that two releases can be compared by eye."""
    head = {"package": contract.package, "version": contract.version, "of": contract.of}
    modules = (f"{json.dumps(m)}: {json.dumps(names)}" for m, names in sorted(contract.modules.items()))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(head)[:-1] + ', "modules": {\n' + ",\n".join(modules) + "\n}}\n")


def record(names: list[str], python: str, out: Path | None) -> dict[str, Any]:
    """Write the contract of a package, or of some of its modules (`a.b`, `a.c`); by default to
    contracts/NAME-VERSION.json, where a script beside that folder finds it."""
    package = names[0].split(".")[0]
    contract = read_installed(python, package, tuple(names), Path.cwd())
    if not contract.modules:
        raise EyasError(f"{python} has no {' or '.join(names)} with Python files", "give names as in `import a.b`")
    file = out or Path("contracts", f"{package}-{contract.version}.json")
    write(contract, file)
    count = sum(len(m) for m in contract.modules.values())
    return {"file": str(file), "package": package, "version": contract.version, "names": count}


def changed(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """How an entry differs from what it was, for whoever calls it."""
    if a.get("kind") != b.get("kind"):
        yield f"was a {a.get('kind')}, is a {b.get('kind')}"
    if a.get("text") != b.get("text"):
        yield f"was {a.get('text')}, is {b.get('text')}"
    if not (a.get("signature") and b.get("signature")):
        return
    old, new = ({p[0]: p for p in read_signature(x["signature"])} for x in (a, b))
    was, now = defaults(a["signature"]), defaults(b["signature"])
    for name, (_, kind, required) in new.items():
        if name not in old and required and not kind.startswith("VAR_"):
            yield f"needs `{name}`"
    for name, (_, kind, _) in old.items():
        if name not in new and not kind.startswith("VAR_"):
            yield f"no longer takes `{name}`"
        elif name in was and name in now and was[name] != now[name]:
            yield f"`{name}` defaults to {now[name]}, not {was[name]}"
    places = [[n for n, (_, k, _) in x.items() if k == "POSITIONAL_OR_KEYWORD"] for x in (old, new)]
    common = [[n for n in side if n in places[0] and n in places[1]] for side in places]
    if common[0] != common[1]:
        yield "parameters changed places"
    returned = [x["signature"].rpartition(" -> ")[2] if " -> " in x["signature"] else "" for x in (a, b)]
    if all(returned) and returned[0] != returned[1]:
        yield f"returns {returned[1]}, not {returned[0]}"
    for name in a.get("notes", {}).keys() & b.get("notes", {}).keys():
        if a["notes"][name] != b["notes"][name]:
            yield f"`{name}` is now {b['notes'][name]}, not {a['notes'][name]}"


def defaults(signature: str) -> dict[str, str]:
    node = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    places = [*node.args.posonlyargs, *node.args.args]
    pairs = list(zip(places[len(places) - len(node.args.defaults) :], node.args.defaults, strict=True))
    pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
    return {a.arg: ast.unparse(d) for a, d in pairs}
