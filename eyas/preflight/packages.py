"""Environment, its packages: the interpreter, versions against what is needed, half-removed packages, extensions
built for another torch. Metadata is read and a few small operations are run; nothing heavy is imported here.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from eyas.errors import EyasError
from eyas.preflight.child import ask
from eyas.preflight.finding import Check, Finding, Subject, error, info, once, warning
from eyas.preflight.script import folder_of, tops

# The newest of each that eyas was tested with; a later major version may have lost names.
TESTED = {"torch": "2.13", "transformers": "5.24", "safetensors": "0.8", "huggingface-hub": "2.4"}
TESTED |= {"datasets": "5.2", "numpy": "2.4", "pyarrow": "26.0", "pydantic": "2.14", "tyro": "1.0"}
SUPPORTED = ">=3.11"
# What each optional package is for, by module name.
OPTIONAL = {"vllm": "serving and extraction", "sglang": "serving", "triton": "GPU kernels"}
OPTIONAL |= {"flash_attn": "target.attention: flash_attention_2", "gguf": "targets kept as GGUF"}
OPTIONAL |= {"wandb": "logging", "mlflow": "logging", "trackio": "logging", "ray": "extraction on many machines"}
OPTIONAL |= {"xformers": "", "flashinfer": "", "deepspeed": "", "bitsandbytes": "", "apex": "", "peft": ""}
OPTIONAL |= {"transformer_engine": "", "liger_kernel": "", "torchvision": "", "torchaudio": "", "accelerate": ""}

# One true operation of each compiled package that eyas stands on: an import alone proves little.
OPERATIONS = {
    "numpy": "import numpy; assert (numpy.eye(2) @ numpy.ones(2)).sum() == 2",
    "safetensors": "from safetensors.numpy import load, save; import numpy; load(save({'a': numpy.ones(2)}))",
    "tokenizers": "import tokenizers as t; t.Tokenizer(t.models.WordLevel({'a': 0}, 'a')).encode('a')",
    "pyarrow": "import pyarrow; assert pyarrow.array([1, 2]).to_pylist() == [1, 2]",
    "pydantic": "import pydantic; assert pydantic.TypeAdapter(int).validate_python('3') == 3",
}


@dataclass(frozen=True)
class Environment:
    """What is installed for one interpreter."""

    version: str
    executable: str
    sites: list[str]
    dists: dict[str, dict[str, Any]]  # lower-case name -> name, version, requires, tops, python
    modules: dict[str, list[str | None] | None]  # top-level module -> file and folder
    stdlib: frozenset[str]

    def dist(self, name: str) -> dict[str, Any] | None:
        wanted = canonicalize_name(name)
        return next((d for n, d in self.dists.items() if canonicalize_name(n) == wanted), None)

    def version_of(self, name: str) -> str:
        found = self.dist(name)
        return found["version"] if found else ""

    def provider(self, top: str) -> dict[str, Any] | None:
        return next((d for d in self.dists.values() if top in d["tops"]), None) or self.dist(top)

    def dist_of(self, top: str) -> str:
        """`name version` of what provides a top-level module."""
        found = self.provider(top)
        return f"{found['name']} {found['version']}" if found else ""

    def requirement(self, top: str, other: str) -> str:
        """What the distribution behind `top` asks of the one behind `other`."""
        mine, theirs = self.provider(top), self.provider(other)
        if not (mine and theirs):
            return ""
        asked, wanted = self.requirements(mine), canonicalize_name(theirs["name"])
        return next((f"{r.name}{r.specifier}" for r in asked if canonicalize_name(r.name) == wanted), "")

    def requirements(self, dist: dict[str, Any]) -> Iterator[Requirement]:
        """What a distribution always needs here."""
        around = {"python_version": ".".join(self.version.split(".")[:2]), "python_full_version": self.version}
        for text in dist["requires"]:
            try:
                r = Requirement(text)
            except InvalidRequirement:
                continue
            if r.marker is None or r.marker.evaluate(around | {"extra": ""}):
                yield r


@once
def environment(s: Subject) -> Environment:
    """Ask the interpreter. Raises EyasError when it is none, or too old to be asked."""
    names, folder = {*OPTIONAL, "torch", "transformers"}, Path(os.devnull)
    if s.script and tops(s):
        names, folder = names | tops(s), folder_of(s)
    reply = ask(s.python, "facts", s.import_limit, folder, modules=sorted(names))
    if reply.result is None:
        said = reply.stderr.strip().splitlines()[-1:] or [reply.ending]
        text = f"{s.python} is no Python 3.9 or newer that can be asked: {said[0]}"
        raise EyasError(text, "give the path of a Python, such as `--python .venv/bin/python`")
    told = reply.result
    told["stdlib"] = frozenset(told["stdlib"])
    return Environment(**{key: told[key] for key in Environment.__dataclass_fields__})


def interpreter_is_supported(s: Subject) -> Iterator[Finding]:
    env = environment(s)
    lowest = SpecifierSet(SUPPORTED)
    text = f"Python {env.version} ({env.executable})"
    if s.about & {"run"} and not lowest.contains(env.version):
        yield error(
            f"{text}; eyas needs {lowest}", "make an environment with a newer Python", {"found": env.version}
        )
    else:
        yield info(text, evidence={"version": env.version, "executable": env.executable})
    for dist in roots(s, env):
        asked = dist["python"]
        if asked and not SpecifierSet(asked).contains(env.version):
            text = f"{dist['name']} {dist['version']} needs Python {asked}; {s.python} is {env.version}"
            yield error(text, f"run with a Python {asked}", {"package": dist["name"], "needs": asked})


def roots(s: Subject, env: Environment) -> list[dict[str, Any]]:
    """The distributions whose needs must be met: eyas for a run, the engine, what a script imports."""
    named = ([s.engine] if s.engine else []) + sorted(tops(s, "always"))
    found = [env.provider(top) for top in named if top not in env.stdlib]
    found += [env.dist("eyas")] if "run" in s.about else []
    return list({d["name"]: d for d in found if d}.values())


def versions_fit(s: Subject) -> Iterator[Finding]:
    """Each need of each root, and each exact pin of torch by anything: such packages hold compiled code for it."""
    env, fitting, said = environment(s), {}, set()
    needs = [(d, r, True) for d in roots(s, env) for r in env.requirements(d)]
    needs += [(d, r, False) for d in env.dists.values() for r in env.requirements(d) if r.name == "torch"]
    for dist, r, is_root in needs:
        found, key = env.dist(r.name), (dist["name"], str(r))
        if key in said or (not is_root and not str(r.specifier).startswith("==")):
            continue
        said.add(key)
        who, install = (
            f"{dist['name']} {dist['version']}",
            f"`{env.executable} -m pip install '{r.name}{r.specifier}'`",
        )
        evidence = {"package": r.name, "by": who, "needs": str(r.specifier), "found": found and found["version"]}
        if found is None:
            yield error(f"{who} needs {r.name}{r.specifier}, which is not installed", install, evidence)
        elif not r.specifier.contains(found["version"], prereleases=True):
            # A library often works outside of the range it states; compiled code and eyas itself do not.
            level = "error" if dist["name"] == "eyas" or r.name == "torch" else "warning"
            text = f"{r.name} {found['version']} is installed, {who} needs {r.specifier}"
            yield Finding(level, text, install, evidence)
        elif is_root:
            fitting[r.name] = {"found": found["version"], "needs": str(r.specifier)}
    for name, tested in TESTED.items() if "run" in s.about else ():
        found = env.version_of(name)
        if found and Version(found).major > Version(tested).major:
            text = f"{name} {found} is newer than the newest that eyas was tested with, {tested}"
            older = f"`{env.executable} -m pip install '{name}<{Version(found).major}'`"
            yield warning(text, f"{older} if something breaks")
    core = {n: env.version_of(n) for n in TESTED if env.version_of(n)}
    listed = ", ".join(f"{n} {v}" for n, v in core.items())
    yield info(f"{len(fitting)} needs are met; {listed}", evidence={"met": fitting, "tested": TESTED})


def installs_are_whole(s: Subject) -> Iterator[Finding]:
    """Libraries look for a package by its folder and then for its version by its metadata: with one of the two
    they crash, or take a wrong turn without a word."""
    env = environment(s)
    needed = {top for d in roots(s, env) for top in d["tops"]} | tops(s, "always")
    for top, place in env.modules.items():
        if place is None or top in env.stdlib or env.provider(top):
            continue
        file, folder = place
        at = next((x for x in (folder, file) if x), "")
        if not at.startswith(tuple(env.sites)):
            continue  # a checkout, or a module beside the script
        what = "has no version metadata" if file else "is an empty remainder of a package"
        hint = (
            f"`{env.executable} -m pip install --force-reinstall {top.replace('_', '-')}`, or remove that folder"
        )
        level = "error" if top in needed else "warning"
        yield Finding(level, f"broken install: {at} {what}", hint, {"module": top, "folder": at})
    for dist in roots(s, env):
        for top in [t for t in dist["tops"] if t in env.modules and env.modules[t] is None]:
            text = (
                f"broken install: {dist['name']} {dist['version']} is listed, but its module `{top}` is not there"
            )
            yield error(
                text, f"`{env.executable} -m pip install --force-reinstall {dist['name']}`", {"module": top}
            )
    there = {t: env.dist_of(t) for t in OPTIONAL if env.modules.get(t) and env.dist_of(t)}
    absent = [t for t in OPTIONAL if t not in there]
    text = f"optional packages: {', '.join(there.values()) or 'none'}"
    yield info(
        text, evidence={"installed": there, "absent": absent, "for": {t: w for t, w in OPTIONAL.items() if w}}
    )


def extensions_fit_torch(s: Subject) -> Iterator[Finding]:
    """Wheels say in their local version which CUDA and torch they were built for: `2.8.3+cu12torch2.8`."""
    env = environment(s)
    torch, own = torch_build(env)
    tags = {"torch": torch} if torch else {}
    for dist in env.dists.values():
        built = built_for(dist["version"])
        if not torch or dist["name"] == "torch" or not built:
            continue
        tags[dist["name"]] = dist["version"]
        for what, tag in built.items():
            mine = own.get(what, tag)  # what is not known of torch cannot be wrong
            if not mine.startswith(tag) and not tag.startswith(mine):  # `12` stands for all of 12.x
                name = {"cuda": "CUDA", "torch": "torch"}[what]
                text = (
                    f"{dist['name']} {dist['version']} is built for {name} {tag}, torch {torch} is {name} {mine}"
                )
                hint = f"install the {dist['name']} built for torch {torch}, or the torch it was built for"
                yield error(text, hint, {"extension": dist["version"], "torch": torch})
    listed = ", ".join(f"{n} {v}" for n, v in tags.items())
    yield info(f"built against each other: {listed or 'torch is not installed'}", evidence=tags)


def torch_build(env: Environment) -> tuple[str, dict[str, str]]:
    """Version and build of the torch that is installed. From PyPI, its metadata does not say the CUDA it is built
    for; its version.py does, and need not be imported for that."""
    version, place = env.version_of("torch"), env.modules.get("torch")
    file = Path(place[1], "version.py") if place and place[1] else Path(os.devnull)
    text = file.read_text() if file.is_file() else ""
    if full := re.search(r"__version__ = '([^']+)'", text):
        version = full[1]
    own = built_for(version) | ({"torch": ".".join(version.split(".")[:2])} if version else {})
    if cuda := re.search(r"^cuda[^=]*= (?:'([\d.]+)'|None)", text, re.MULTILINE):
        own["cuda"] = cuda[1].replace(".", "") if cuda[1] else own.get("cuda", "cpu")
    return version, own


def built_for(version: str) -> dict[str, str]:
    """{"cuda": "126" or "cpu", "torch": "2.8"} as far as a version's local part says."""
    local = version.partition("+")[2].lower()
    found = {}
    if cuda := re.search(r"cu(\d{2,3})(?!\d)", local):
        found["cuda"] = cuda[1]
    elif re.match(r"cpu", local):
        found["cuda"] = "cpu"
    if torch := re.search(r"torch(\d+\.\d+)", local):
        found["torch"] = torch[1]
    elif torch := re.search(r"pt(\d)\.?(\d+)", local):
        found["torch"] = f"{torch[1]}.{torch[2]}"
    return found


def compiled_packages_work(s: Subject) -> Iterator[Finding]:
    env = environment(s)
    present = {name: code for name, code in OPERATIONS.items() if env.dist(name)}
    bad = 0
    for name, code in present.items():
        reply = ask(s.python, "run", s.import_limit, code=code)
        if reply.result is None:
            bad += 1
            hint = f"`{env.executable} -m pip install --force-reinstall {name}`"
            yield error(
                f"{name} {env.version_of(name)} is installed and does not work: {reply.fault}",
                hint,
                {"code": code},
            )
    yield info(f"{len(present) - bad} compiled packages did one operation each: {', '.join(present)}")


CHECKS = [
    Check("python", "environment", (), interpreter_is_supported, "machine"),
    Check("versions", "environment", ("python",), versions_fit, "machine"),
    Check("installs", "environment", ("python",), installs_are_whole, "machine"),
    Check("extensions", "environment", ("python",), extensions_fit_torch, "machine"),
    Check("operations", "environment", ("python",), compiled_packages_work, "machine"),
]
