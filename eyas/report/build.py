"""The run's page: one HTML file that opens anywhere, offline, made from the files of the run's folder alone."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from eyas import __version__
from eyas.config import RunConfig
from eyas.errors import EyasError
from eyas.files import write_text
from eyas.pipeline import STAGES, Context, read_manifest
from eyas.report import plots

OUTPUTS_PER_SET = 2
OUTPUT_TOKENS = 400


def run(ctx: Context) -> dict[str, Any]:
    """Stage: write `index.html`. What other stages have not made is said on the page."""
    page = read_run(ctx.run_dir)
    html = render(page)
    write_text(ctx.out / "index.html", html)
    counts = {"bytes": len(html.encode()), "problems": len(page["problems"]), "missing": len(page["missing"])}
    return {"counts": counts, "page": "index.html"}


def render(page: dict[str, Any]) -> str:
    """HTML of what `read_run` found. Everything that comes from data is escaped by the template engine."""
    env = Environment(loader=PackageLoader("eyas.report", ""), autoescape=True, undefined=StrictUndefined)
    env.trim_blocks = env.lstrip_blocks = True
    env.filters |= {"number": number, "shown": lambda text: text.replace("\n", "↵\n")}
    return env.get_template("template.html").render(**page, plotlyjs=get_plotlyjs(), version=__version__)


def read_run(run_dir: Path) -> dict[str, Any]:
    """Everything the page shows, as plain values; figures by the id of their place."""
    names = [s.name for s in STAGES if s.name != "report"]
    results = {n: r for n in [*names, "preflight"] if (r := _json(run_dir / n / "result.json")) is not None}
    sets, findings, config = results.get("evaluate", {}).get("sets", {}), _findings(results), run_dir / "run.yaml"
    return {
        "name": run_dir.resolve().name,
        "target": RunConfig.load(config).target.model if config.is_file() else "",
        "results": results,
        "missing": [n for n in [*names, "preflight"] if n not in results and n != "regenerate"],
        "problems": _problems(results, findings),
        "findings": findings,
        "sets": sets,
        "outputs": _outputs(run_dir / "evaluate" / "outputs.jsonl"),
        "figures": _figures(sets, _jsonl(run_dir / "train" / "logs" / "metrics.jsonl"), results),
        "provenance": _json(run_dir / "run.json") or {},
        "manifests": {name: m for name in names if (m := read_manifest(run_dir / name))},
        "config": config.read_text() if config.is_file() else "",
    }


def _figures(sets: dict[str, Any], rows: list[dict[str, Any]], results: dict[str, Any]) -> dict[str, Any]:
    rates = {name: s["accept_rate_by_position"] for name, s in sets.items() if s["accept_rate_by_position"]}
    accuracy = {f"eval.accuracy_by_position.{k}": f"step {k}" for k in range(16)}
    seconds = {name: r["seconds"] for name, r in results.items() if "seconds" in r}
    figures = {
        "loss": plots.curves(rows, {"train.loss": "training", "eval.loss": "held-out"}, "nats"),
        "heldout": plots.curves(rows, {"eval.tau": "held-out"}, "τ"),
        "accuracy": plots.curves(rows, accuracy, "share right"),
        "lr": plots.curves(rows, {"train.lr": "learning rate"}, "learning rate"),
        "alpha": plots.acceptance(rates),
        "time": plots.bars(seconds, f"seconds, {sum(seconds.values()):,.0f} in all", digits=1),
    }
    for i, part in enumerate(sets.values()):
        taus = {c: v["tau"] for c, v in part["by_category"].items() if v["tau"] is not None}
        figures[f"tau-{i}"] = plots.bars(taus, "τ", digits=2)
    return {place: figure for place, figure in figures.items() if figure}


def _findings(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Findings of the preflight and of the exports' verification, each with `where` and that part's `status`."""
    parts = [(f"preflight: {s['name']}", s["status"], s) for s in results.get("preflight", {}).get("stages", [])]
    for layout, checked in results.get("export", {}).get("verify", {}).items():
        parts.append((f"export: {layout}", "passed" if checked["ok"] else "failed", checked))
    blank, quiet = {"check": "", "hint": ""}, [{"level": "info", "message": "nothing wrong found"}]
    return [blank | f | {"where": w, "status": status} for w, status, p in parts for f in p["findings"] or quiet]


def _problems(results: dict[str, Any], findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every warning and error that the run's own results carry, the worst first."""
    told = {name: r.get("warnings", []) for name, r in results.items() if name != "export"}  # its are findings too
    found = [(name, "warning", text) for name, texts in told.items() for text in texts]
    kinds = (("different", "error", "not by rounding"), ("ties", "warning", "at a near tie"))
    for name, part in results.get("evaluate", {}).get("sets", {}).items():
        for verdict, level, why in kinds:
            if count := part[verdict]:
                text = f"{name}: {count} of {part['prompts']} outputs part from plain decoding, {why}"
                found.append(("evaluate", level, text))
    problems = [{"where": where, "level": level, "message": text, "hint": ""} for where, level, text in found]
    return sorted(problems + [f for f in findings if f["level"] != "info"], key=lambda p: p["level"] != "error")


def _outputs(path: Path) -> list[dict[str, Any]]:
    """The first outputs of each set, their pieces as (text, drafted)."""
    shown: list[dict[str, Any]] = []
    for row in _jsonl(path):
        if sum(r["set"] == row["set"] for r in shown) < OUTPUTS_PER_SET:
            pieces = list(zip(row["pieces"], accepted_tokens(row["rounds"], len(row["pieces"])), strict=True))
            shown.append(row | {"pieces": pieces[:OUTPUT_TOKENS], "tokens": len(pieces)})
    return shown


def accepted_tokens(rounds: list[int], total: int) -> list[bool]:
    """Whether the draft proposed each of `total` new tokens: the first comes with the prompt, each round gives its
    accepted ones and one of the target's own (but for a last round that the end of the answer cut)."""
    return [False, *(mark for accepted in rounds for mark in [True] * accepted + [False])][:total]


def number(value: Any, digits: int = 2) -> str:
    """A number for people: thousands parted, `digits` decimals unless whole, a dash when there is none."""
    if value is None or isinstance(value, bool | str):
        return "–" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text()) if path.is_file() else None
    except json.JSONDecodeError as e:
        raise EyasError(f"{path} is not valid JSON: {e}", "run that stage again") from e


def _jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line.strip()] if path.is_file() else []
