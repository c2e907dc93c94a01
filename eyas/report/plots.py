"""The page's charts as plotly figures. Colours are CSS variables, filled in by the page (light or dark)."""

from typing import Any

import plotly.graph_objects as go

SERIES = ["var(--accent)", "var(--second)", "var(--third)", "var(--muted)"]


def _figure(traces: list[Any], x: str, y: str, height: int = 300, **layout: Any) -> dict[str, Any]:
    """A figure as plotly JSON with the page's common look; `x` and `y` are axis titles with units."""
    figure = go.Figure(traces)
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 56, "r": 12, "t": 12, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "var(--ink)", "size": 13, "family": "system-ui, sans-serif"},
        hoverlabel={"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        showlegend=len(traces) > 1,
        **layout,
    )
    grid = {"gridcolor": "var(--line)", "zeroline": False, "linecolor": "var(--line)", "automargin": True}
    figure.update_xaxes(title={"text": x, "standoff": 8}, **grid)
    figure.update_yaxes(title={"text": y, "standoff": 8}, **grid)
    return figure.to_plotly_json()


def _line(x: list[Any], y: list[Any], name: str, colour: str, mode: str = "lines") -> Any:
    return go.Scatter(x=x, y=y, name=name, mode=mode, line={"color": colour, "width": 2})


def curves(rows: list[dict[str, Any]], series: dict[str, str], y: str, **layout: Any) -> dict[str, Any] | None:
    """Metrics over optimiser steps. `series`: dotted key in a row ("eval.loss") -> name in the legend."""
    traces = []
    for key, name in series.items():
        points = [(r["step"], v) for r in rows if (v := dig(r, key)) is not None]
        if points:
            mode = "lines+markers" if len(points) < 40 else "lines"
            traces.append(_line([p[0] for p in points], [p[1] for p in points], name, SERIES[len(traces) % 4], mode))
    return _figure(traces, "optimiser step", y, **layout) if traces else None


def acceptance(sets: dict[str, list[float | None]]) -> dict[str, Any]:
    """α_k bars, one group of bars for each set of prompts."""
    traces = [
        go.Bar(x=[str(k + 1) for k in range(len(rates))], y=rates, name=escape(name), marker_color=SERIES[i % 4])
        for i, (name, rates) in enumerate(sets.items())
    ]
    figure = _figure(traces, "draft position k", "accepted, given all before it", bargap=0.35)
    figure["layout"]["yaxis"] |= {"range": [0, 1], "tickformat": ".0%"}
    figure["layout"]["xaxis"]["type"] = "category"
    return figure


def bars(values: dict[str, float], x: str, start: float = 0.0, digits: int = 2) -> dict[str, Any]:
    """Horizontal bars with their numbers, in the order given; `start` is where the axis begins."""
    names, numbers = [escape(n) for n in values], list(values.values())
    text = [f"{v:,.{digits}f}" for v in numbers]
    bar = go.Bar(y=names, x=numbers, orientation="h", marker_color=SERIES[0], text=text, cliponaxis=False)
    figure = _figure([bar], x, "", height=90 + 30 * len(names), bargap=0.35)
    figure["layout"]["yaxis"] |= {"autorange": "reversed", "type": "category"}
    figure["layout"]["xaxis"]["range"] = [start, max([*numbers, start]) * 1.12 or 1.0]
    return figure


def dig(value: Any, dotted: str) -> Any:
    """value["a"]["b"] for "a.b", None where it stops."""
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def escape(text: str) -> str:
    """Names come from data, and plotly reads a little HTML in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
