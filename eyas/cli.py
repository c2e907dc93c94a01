"""Commands and nothing else: parse, call, print.

Every command takes `--json` (exactly one JSON object on stdout; everything else goes to stderr). Exit codes:
0 done, 1 the work or a check failed, 2 wrong usage.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from eyas import __version__
from eyas.config import RunConfig, keys, nearest
from eyas.errors import EyasError, UsageError
from eyas.progress import console, say, warn

ABOUT = """Train an EAGLE-3 draft model for a target, and prove every step on the way.

Start with `eyas run CONFIG.yaml`: it makes what is missing and goes on where it was stopped. Every key of the
config is a flag too (--train.lr 3e-4); `eyas config explain` lists them with their meaning."""


@dataclass(kw_only=True)
class _Output:
    json: bool = False
    """Print one JSON object on stdout."""
    quiet: bool = False
    """Print no progress and no messages, only errors."""


@dataclass(kw_only=True)
class _OnConfig(_Output):
    config: Positional[Path]
    """The run's YAML file."""
    run_dir: Path | None = None
    """Where the run is kept, instead of the config's run_dir."""
    set: Annotated[list[str], arg(metavar="KEY=VALUE", default=())] = field(default_factory=list)
    """Config values, e.g. --set train.lr=3e-4 train.epochs=2 (the same as --train.lr 3e-4 ...)."""


@dataclass(kw_only=True)
class Run(_OnConfig):
    """Run every stage that is not fresh, in order."""

    from_: Annotated[str | None, arg(name="from")] = None
    """Run again from this stage on, fresh or not."""
    only: str | None = None
    """Run this stage alone."""
    preflight: bool = True
    """Prove data, features and model before training starts."""


@dataclass(kw_only=True)
class Preflight(_OnConfig):
    """Check everything that can be checked before GPU hours are spent: a run, a script, an engine, or several."""

    config: Positional[Path | None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """The run's YAML file."""
    script: Path | None = None
    """A training script: its imports and calls are checked, it is never run."""
    engine: Literal["vllm", "sglang"] | None = None
    """A serving engine: is what extraction and serving need of it there?"""
    python: str = sys.executable
    """The interpreter in which the script and the engine will run."""
    import_limit: float = 60.0
    """Seconds that importing one module may take."""
    stage: list[str] = field(default_factory=list)
    """Check these stages only."""
    skip: list[str] = field(default_factory=list)
    """Leave these stages or checks out."""
    features: Path | None = None
    """Look at this folder's features instead of the run's: a feature store, or sample files of another tool."""
    draft: Path | None = None
    """Look at this folder with an exported draft too."""
    target: str | None = None
    """The target that features or draft are compared with, instead of the config's: id or folder."""
    strict: bool = False
    """Fail on warnings too."""
    budget: float | None = None
    """Seconds after which no further check is started."""


@dataclass(kw_only=True)
class Contracts(_Output):
    """record: write down what a package promises (names, signatures), to be compared in later preflights."""

    action: Positional[Literal["record"]]
    package: Positional[list[str]]
    """The package, or some of its modules: `a.b a.c`."""
    python: str = sys.executable
    """The interpreter it is installed for."""
    out: Path | None = None
    """The file to write; default contracts/PACKAGE-VERSION.json."""


@dataclass(kw_only=True)
class Train(_OnConfig):
    """Train the draft on stored features (after the preflight)."""

    preflight: bool = True
    """Prove data, features and model before training starts."""


@dataclass(kw_only=True)
class OneStage(_OnConfig):
    pass


@dataclass(kw_only=True)
class Verify(_Output):
    """Check an exported draft: names, shapes, dtypes, tables, config, by the engine's own rules."""

    draft: Positional[Path]
    """Folder with config.json and weights."""
    target: str | None = None
    """The target it was made for (id or folder): sizes are compared."""
    run: Path | None = None
    """The run that made it: its logits must equal the trained draft's."""


@dataclass(kw_only=True)
class Status(_Output):
    """Say which stages of a run are made, fresh, stale or half done."""

    run: Positional[Path]
    """The run's folder."""


@dataclass(kw_only=True)
class Config(_Output):
    """show: the resolved config; explain: every key, its default and meaning."""

    action: Positional[Literal["show", "explain"]]
    config: Positional[Path | None] = None
    """The run's YAML file (for show)."""


_STAGE_HELP = {
    "regenerate": "Let the target answer the prompts itself.",
    "prepare": "Read, check, render and mask conversations; split off the held-out ones.",
    "extract": "Run the target over every sample and store its hidden states.",
    "vocab": "Choose the draft vocabulary by counting supervised tokens.",
    "evaluate": "Decode with and without the draft: acceptance, identity, speed.",
    "export": "Write and prove the checkpoints that vLLM and SGLang load.",
    "report": "Write the run's page, report/index.html.",
}


def _commands() -> Any:
    stages = tuple(
        Annotated[
            dataclasses.make_dataclass(n.title(), [], bases=(OneStage,), namespace={"__doc__": d}),
            subcommand(n),
        ]
        for n, d in _STAGE_HELP.items()
    )
    named = {
        "run": Run,
        "preflight": Preflight,
        "contracts": Contracts,
        "train": Train,
        "verify": Verify,
        "status": Status,
        "config": Config,
    }
    rest = tuple(Annotated[cls, subcommand(name)] for name, cls in named.items())
    union: Any = None
    for command in rest + stages:
        union = command if union is None else union | command
    return union


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Parse, call, print; returns the exit code."""
    if argv == ["--version"]:
        print(__version__)
        return 0
    as_json = "--json" in argv
    try:
        command, rest = tyro.cli(_commands(), args=argv, prog="eyas", description=ABOUT, return_unknown_args=True)
        console.quiet = command.quiet
        if rest and not isinstance(command, _OnConfig):
            raise UsageError(f"unknown option {rest[0]}", "see `eyas --help`")
        result, code = _call(command, rest)
    except EyasError as e:
        code = 2 if isinstance(e, UsageError) else 1
        console.quiet = False
        say(f"error: {e.message}", "bold red")
        if e.hint:
            say(f"hint: {e.hint}", "bold")
        result = {"ok": False, "error": e.message, "hint": e.hint}
    except KeyboardInterrupt:
        code, result = 1, {"ok": False, "error": "stopped", "hint": "run the same command again to go on"}
        say("stopped; run the same command again to go on")
    except SystemExit as e:  # tyro has printed help, or what is wrong with the arguments
        code = e.code if isinstance(e.code, int) else 2
        if not code:
            return 0
        result = {"ok": False, "error": "wrong usage: stderr says what", "hint": "see `eyas --help`"}
    if as_json and os.environ.get("RANK", "0") == "0":
        print(json.dumps(result, allow_nan=False))
    return code


def _call(command: Any, rest: list[str]) -> tuple[dict[str, Any], int]:
    if isinstance(command, Status):
        return _status(command.run)
    if isinstance(command, Config):
        return _config(command)
    if isinstance(command, Verify):
        from eyas.export.verify import verify

        result = verify(command.draft, run_dir=command.run, target=command.target)
        _print_findings(result["findings"], f"{command.draft}: {result['format']}")
        return result, 0 if result["ok"] else 1
    if isinstance(command, Contracts):
        from eyas.preflight.contract import record

        result = record(command.package, command.python, command.out)
        say(f"{result['file']}: {result['names']} names of {result['package']} {result['version']}")
        return result, 0
    config = resolve(command, rest) if command.config else None
    if config and not config.target.model:
        raise UsageError("target.model is empty", "name the target: a Hugging Face id or a folder")
    if isinstance(command, Preflight):
        return _preflight(config, command.stage, command.skip, command)
    assert config is not None
    from eyas import pipeline

    names = [s.name for s in pipeline.stages_of(config)]
    only = None if isinstance(command, Run) else type(command).__name__.lower()
    start = None
    if isinstance(command, Run):
        only, start = command.only, command.from_
    for name in (only, start):
        if name and name not in names:
            raise UsageError(f"unknown stage {name!r} for this config", f"one of: {', '.join(names)}")
    checks = _before(config) if getattr(command, "preflight", False) else {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _in_ranks(command, config, checks)
    result = pipeline.run(config, start=start, only=only, before=checks)
    if only:
        result = {"run_dir": result["run_dir"], **result["stages"][only]}
    elif not console.quiet:
        _summary(result)
    failed = any(r.get("ok") is False for r in (result, *result.get("stages", {}).values()))
    return result, 1 if failed else 0


def _in_ranks(command: Any, config: RunConfig, checks: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """`eyas train` under torchrun: rank 0 keeps the run's books, the others train when it does."""
    from eyas import pipeline
    from eyas.train import distributed, stage

    if not isinstance(command, Train):
        raise UsageError("torchrun is for `eyas train` alone", "make the other stages in one process first")
    distributed.start()
    if distributed.rank():
        console.quiet = True
        if distributed.tell():
            stage.run(pipeline.Context(config, Path(config.run_dir), Path(config.run_dir) / "train.partial"))
        return {}, 0
    told: list[bool] = []

    def begin() -> None:
        if "train" in checks:
            with distributed.alone():  # the dry run takes optimiser steps, which the other ranks do not
                checks["train"]()
        told.append(distributed.tell(True))

    try:
        result = pipeline.run(config, only="train", before={"train": begin})
    finally:
        if not told:
            distributed.tell(False)
    return {"run_dir": result["run_dir"], **result["stages"]["train"]}, 0


def resolve(command: _OnConfig, rest: list[str]) -> RunConfig:
    """The file's values, then --set, then flags. Raises UsageError for unknown keys; tyro reports bad values."""
    base = RunConfig.load(command.config)
    given: list[str] = []
    for pair in command.set:
        key, eq, value = pair.partition("=")
        if not eq or key not in keys():
            raise UsageError(f"--set {pair}: expected KEY=VALUE with a known key{nearest(key)}")
        given += [f"--{key}", *value.split(",")]
    config, unknown = tyro.cli(
        RunConfig,
        args=given + rest,
        default=base,
        prog=f"eyas run {command.config}",
        return_unknown_args=True,
    )
    if unknown:
        key = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
        raise UsageError(f"unknown option {unknown[0]}{nearest(key)}")
    return config.model_copy(update={"run_dir": str(command.run_dir)}) if command.run_dir else config


def _preflight(
    config: RunConfig | None, only: list[str], skip: list[str], named: Preflight | None = None
) -> tuple[dict[str, Any], int]:
    from eyas.files import write_json
    from eyas.preflight.finding import Subject
    from eyas.preflight.runner import run_preflight
    from eyas.preflight.table import live, render

    things = ("script", "engine", "features", "draft")
    others = {n: getattr(named, n) for n in (*things, "python", "import_limit", "target")} if named else {}
    if not (config or any(others.get(n) for n in things)):
        raise UsageError("nothing to check", "give a CONFIG.yaml, --script, --engine, --features or --draft")
    how = {"strict": named.strict, "budget": named.budget} if named else {}
    with live() as watch:
        result = run_preflight(Subject(config, **others), only or None, skip, watch=watch, **how)
    if config:
        write_json(Path(config.run_dir) / "preflight" / "result.json", result)
    if not console.quiet and (not only or named or {s["status"] for s in result["stages"]} != {"passed"}):
        render(result)
    return result, 0 if result["ok"] else 1


def _before(config: RunConfig) -> dict[str, Callable[[], None]]:
    """Checks before the stages that cost hours: each as early as what it looks at is there."""
    early = {"regenerate": ["config"], "prepare": ["config"], "extract": ["config", "data"], "train": []}

    def check(stages: list[str]) -> None:
        result, code = _preflight(config, stages, [])
        if code:
            found = [f for s in result["stages"] for f in s["findings"] if f["level"] == "error"]
            errors = [f["message"] + (f" ({f['hint']})" if f["hint"] else "") for f in found]
            kind = UsageError if result["stages"][0]["status"] == "failed" and stages else EyasError
            hint = "mend these, or go on at your own risk with --no-preflight"
            raise kind("preflight failed: " + "; ".join(errors), hint)

    return {stage: partial(check, stages) for stage, stages in early.items()}


def _status(run_dir: Path) -> tuple[dict[str, Any], int]:
    from eyas import pipeline

    result = pipeline.status(run_dir)
    for name, stage in result["stages"].items():
        counts = ", ".join(f"{k} {v:,}" for k, v in stage["counts"].items() if isinstance(v, int))
        seconds = f"{stage['seconds']:,.1f} s" if stage.get("seconds") else ""
        say(f"{name:12} {stage['state']:8} {seconds:>10}  {counts or stage['reason'] or ''}")
    return result, 0


def _config(command: Config) -> tuple[dict[str, Any], int]:
    if command.action == "show":
        config = RunConfig.load(command.config) if command.config else RunConfig()
        if not command.json:
            print(config.to_yaml(), end="")
        return config.model_dump(mode="json"), 0
    explained = {}
    for key, info in keys().items():
        default = info.get_default(call_default_factory=True)
        explained[key] = {"default": default, "help": info.description}
        if not command.json:
            print(f"{key}: {json.dumps(default)}\n    {info.description}")
    return explained, 0


def _print_findings(findings: list[dict[str, Any]], title: str) -> None:
    say(title)
    for f in findings:
        hint = f" ({f['hint']})" if f.get("hint") else ""
        say(
            f"  {f['level']} {f['message']}{hint}",
            {"error": "red", "warning": "yellow", "info": "dim"}[f["level"]],
        )


def _summary(result: dict[str, Any]) -> None:
    """The few lines people look for after a run."""
    for name, stage in result["stages"].items():
        for text in stage.get("warnings", []) if stage["status"] == "fresh" else ():
            warn(f"{name}: {text}")  # a stage that ran has said so itself
    evaluated = result["stages"].get("evaluate", {})
    for name, part in evaluated.get("sets", {}).items():
        if part.get("tau") is not None:
            same = f"{part['identical']}/{part['prompts']} outputs identical"
            speed = "not timed"
            if part["speedup"] is not None:
                rates = f"{part['speculative_tok_s']:.1f} tok/s against {part['baseline_tok_s']:.1f}"
                speed = f"{rates} ({part['speedup']:.2f}x, {part['timed']} prompts timed)"
            say(f"{name}: tau {part['tau']:.2f} tokens per target pass, {same}, {speed}")
    page = Path(result["run_dir"]) / "report" / "index.html"
    if page.is_file():
        say(f"report: {os.path.relpath(page)}")


if __name__ == "__main__":
    main()
