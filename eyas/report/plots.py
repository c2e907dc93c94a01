"""The page's charts as plotly figures. Colours are CSS variables that the page fills in, light or dark."""

import html
from typing import Any

import plotly.graph_objects as go

SERIES = ["var(--accent)", "var(--second)", "var(--third)", "var(--muted)"]


def curves(rows: list[dict[str, Any]], series: dict[str, str], y: str) -> dict[str, Any] | None:
    """Metrics over optimiser steps. `series`: dotted key in a row ("eval.loss") -> name in the legend."""
    traces = []
    for key, name in series.items():
        if points := [(r["step"], v) for r in rows if (v := dig(r, key)) is not None]:
            x, values = zip(*points, strict=True)
            mode = "lines+markers" if len(points) < 40 else "lines"
            line = {"color": SERIES[len(traces) % 4], "width": 2}
            traces.append(go.Scatter(x=x, y=values, name=name, mode=mode, line=line))
    return _figure(traces, "optimiser step", y)


def acceptance(sets: dict[str, list[float | None]]) -> dict[str, Any] | None:
    """α_k bars, one colour for each set of prompts; a position nobody reached has no bar."""
    traces = []
    for i, (name, rates) in enumerate(sets.items()):
        text = ["" if r is None else f"{r:.0%}" for r in rates]
        bar = go.Bar(x=[str(k + 1) for k in range(len(rates))], y=rates, name=escape(name), text=text)
        traces.append(bar.update(marker_color=SERIES[i % 4], textposition="outside", cliponaxis=False))
    share, position = {"range": [0, 1.05], "tickformat": ".0%"}, {"type": "category", "showgrid": False}
    return _figure(traces, "draft position k", "α", xaxis=position, yaxis=share)


def bars(values: dict[str, float], x: str, digits: int) -> dict[str, Any] | None:
    """Horizontal bars with their numbers, in the order given."""
    text = [f"{v:,.{digits}f}" for v in values.values()]
    bar = go.Bar(y=[escape(n) for n in values], x=list(values.values()), orientation="h", text=text)
    bar.update(marker_color=SERIES[0], textposition="outside", cliponaxis=False)
    names, room = {"autorange": "reversed", "type": "category", "showgrid": False}, max(values.values(), default=0)
    size = {"height": 80 + 28 * len(values), "xaxis": {"range": [0, room * 1.15 or 1.0]}, "yaxis": names}
    return _figure([bar] if values else [], x, "", **size)


def _figure(traces: list[Any], x: str, y: str, height: int = 300, **axes: Any) -> dict[str, Any] | None:
    """A figure as plotly JSON with the page's common look; `x` and `y` are axis titles. None without traces."""
    if not traces:
        return None
    figure, ink = go.Figure(traces), {"color": "var(--ink)", "size": 13, "family": "system-ui, sans-serif"}
    clear, legend = "rgba(0,0,0,0)", {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    figure.update_layout(template="none", height=height, margin={"l": 56, "r": 12, "t": 12, "b": 48}, bargap=0.35)
    figure.update_layout(paper_bgcolor=clear, plot_bgcolor=clear, font=ink, legend=legend)
    figure.update_layout(hoverlabel={"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": ink})
    grid = {"gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False, "automargin": True}
    figure.update_xaxes(title={"text": x, "standoff": 8, "font": ink}, **grid)
    figure.update_yaxes(title={"text": y, "standoff": 8, "font": ink}, **grid)
    return figure.update_layout(showlegend=len(traces) > 1, **axes).to_plotly_json()


def dig(value: Any, dotted: str) -> Any:
    """value["a"][0] for "a.0"; None where the path ends early."""
    for part in dotted.split("."):
        if isinstance(value, list):
            value = dict(enumerate(value)).get(int(part))
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def escape(text: str) -> str:
    """Names come from data, and plotly reads a little HTML in labels."""
    return html.escape(text, quote=False)
