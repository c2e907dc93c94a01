"""Contracts: what packages promised when a script was written, against what is installed now.

Contracts of real releases come with eyas; a folder `contracts` beside the script adds its own, made by
`eyas contracts record PACKAGE`.
"""

import json
from collections.abc import Iterator

from packaging.version import Version

from eyas.preflight.contract import RECORDED, Contract, changed, load, read_installed
from eyas.preflight.finding import Check, Finding, Subject, info, once, warning
from eyas.preflight.packages import environment
from eyas.preflight.script import Use, folder_of, scripts, tops, uses


def known(s: Subject, package: str) -> list[Contract]:
    own = load(s.script.resolve().parent / "contracts") if s.script else ()
    return [c for c in (*load(RECORDED), *own) if c.package == package]


@once
def written_for(s: Subject, package: str) -> Contract | None:
    """The newest recorded release that has every name the script uses, as it uses them; else None."""
    mine = used(s, package)
    return next((c for c in reversed(known(s, package)) if not any(c.lacks(use) for use in mine)), None)


def used(s: Subject, package: str) -> list[Use]:
    return [use for use in uses(s) if use.module.split(".")[0] == package and use.where.need == "always"]


def changes(s: Subject, package: str) -> list[dict[str, str]]:
    """What signatures do not tell: name, the release `since` which it is otherwise, and how."""
    file = RECORDED / "changes" / f"{package}.json"
    return json.loads(file.read_text()) if file.is_file() else []


def wanted(s: Subject, top: str) -> str:
    """What to ask pip for: the release the script was written for, where that can be told."""
    names = {
        "yaml": "pyyaml",
        "cv2": "opencv-python",
        "PIL": "pillow",
        "sklearn": "scikit-learn",
        "dotenv": "python-dotenv",
    }
    then = written_for(s, top)
    return f"{top}=={then.version}" if then else names.get(top, top.replace("_", "-"))


def remedy(s: Subject, use: Use, called: bool = False) -> str:
    """What replaced a name (or, if `called`, how it is called now), and which recorded releases are as before."""
    top, installed = use.module.split(".")[0], environment(s).provider(use.module.split(".")[0])
    releases = known(s, top)
    fits = [c for c in releases if (not c.lacks(use) if called else c.find(use.module, use.chain))]
    if not fits or not installed:
        return ""
    pin = f"`pip install {top}=={fits[-1].version}`"
    broke = next((c.version for c in releases if Version(c.version) > Version(fits[-1].version)), "")
    names = (use.name, ".".join((use.module, *use.chain[:1])), use.module)
    told = [
        n for n in changes(s, top) if n["name"] in names and Version(n["since"]) <= Version(installed["version"])
    ]
    told = [n for n in told if n["since"] == broke] or [n for n in told if "still" not in n and not called]
    if told:
        return f"since {told[-1]['since']}: {told[-1]['text']}; or {pin}"
    span = fits[0].version if len(fits) == 1 else f"{fits[0].version} to {fits[-1].version}"
    return f"{top} {span} had this: {pin}"


def nothing_drifted(s: Subject) -> Iterator[Finding]:
    """Names may still be there and mean something else: other parameters, defaults, results, shapes."""
    for package in sorted(tops(s, "always")):
        releases = known(s, package)
        if not releases or environment(s).modules.get(package) is None:
            continue  # that it is absent, `modules` tells
        then = written_for(s, package)
        base = then or releases[-1]
        now = read_installed(s.python, package, base.of, folder_of(s), s.import_limit)
        evidence = {"written_for": then and then.version, "installed": now.version}
        evidence |= {"recorded": [c.version for c in releases]}
        if then is None:
            text = f"no recorded release of {package} has every name as {s.script} uses it"
            yield warning(f"{text}; {now.version} is installed", "`names` and `calls` say which", evidence)
        elif any(now.lacks(use) for use in used(s, package)):
            text = f"{s.script} is written for {package} {then.version}, {now.version} is installed"
            pin = f"`{s.python} -m pip install {package}=={then.version}` brings all of it back"
            yield warning(
                text, f"{pin}; or change the script where `modules`, `names` and `calls` say so", evidence
            )
        drift = list(differences(s, base, now))
        for use, text in drift:
            message = f"{use.at}: from {package} {base.version} to {now.version}: {text}"
            yield warning(
                message,
                f"see that line {use.line} still means the same",
                evidence | {"file": str(use.file), "line": use.line, "name": use.name},
            )
        for note in changes(s, package):
            mine = next((u for u in uses(s) if note["name"] == ".".join((u.module, *u.chain[:1]))), None)
            between = Version(base.version) < Version(note["since"]) <= Version(now.version)
            if mine and between and note.get("still"):
                since = f"since {package} {note['since']}: {note['text']}"
                text = f"{mine.at}: `{note['name']}` behaves otherwise {since}"
                hint = f"see that the script still means this, or use {package} {base.version}"
                yield warning(text, hint, evidence | {"since": note["since"], "line": mine.line})
        if then and not drift:
            text = f"{package} {now.version} promises what the script uses as {then.version} did, which it fits"
            yield info(text, evidence=evidence)


def differences(s: Subject, then: Contract, now: Contract) -> Iterator[tuple[Use, str]]:
    """For each name that the script uses: what is no longer as it was."""
    said, written = set(), set().union(*(script.attributes for script in scripts(s)))
    made = {use.name for use in uses(s) if use.call}
    for use in uses(s):
        if use.module.split(".")[0] != then.package or use.name in said:
            continue
        said.add(use.name)
        a, b = then.find(use.module, use.chain), now.find(use.module, use.chain)
        if a is None or a["kind"] == "unknown" or (b and b["kind"] == "unknown"):
            continue
        if b is None:
            continue  # `modules` or `names` has said so, with the cure
        if found := list(changed(a, b)):
            yield use, f"`{use.name}` {', '.join(found)}"
        for method, old in a.get("methods", {}).items():
            new = b.get("methods", {}).get(method)
            used = method in written or (method in ("forward", "__call__") and use.name in made)
            if used and new and (found := list(changed(old, new))):
                yield use, f"`{use.name}.{method}` {', '.join(found)}"


CHECKS = [Check("drift", "imports", ("script",), nothing_drifted, "script")]
