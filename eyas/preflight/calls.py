"""Do the arguments of a call, as they are written, fit a signature?"""

import ast
from dataclasses import dataclass

Parameter = tuple[str, str, bool]  # name, kind as inspect names it, required


@dataclass(frozen=True)
class Call:
    """Arguments as written: `open_ended` when *args or **kwargs may bring more."""

    positional: int
    keywords: tuple[str, ...]
    more_positional: bool = False
    more_keywords: bool = False

    @classmethod
    def of(cls, node: ast.Call) -> "Call":
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        named = tuple(k.arg for k in node.keywords if k.arg)
        return cls(len(plain), named, len(plain) < len(node.args), len(named) < len(node.keywords))


def misfit(parameters: list[Parameter], call: Call) -> str | None:
    """What does not fit, in words; None when it fits or cannot be told."""
    kinds = {kind for _, kind, _ in parameters}
    places = [p for p in parameters if p[1] in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    named = {
        name: required for name, kind, required in parameters if kind in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
    }
    if call.positional > len(places) and "VAR_POSITIONAL" not in kinds:
        return f"takes {len(places)} positional argument{'s' * (len(places) != 1)}, {call.positional} are given"
    for keyword in call.keywords:
        if keyword not in named and "VAR_KEYWORD" not in kinds:
            return f"has no parameter `{keyword}`"
    filled = {name for name, _, _ in places[: call.positional]}
    if twice := [name for name in call.keywords if name in filled and name in named]:
        return f"gets `{twice[0]}` twice, by place and by name"
    left = [] if call.more_positional else places[call.positional :]
    left += [p for p in parameters if p[1] == "KEYWORD_ONLY"]
    missing = [f"`{name}`" for name, _, required in left if required and name not in call.keywords]
    if missing and not call.more_keywords:
        return f"needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not given"
    return None


def written(parameters: list[Parameter]) -> str:
    """`(a, b=…, *, c)`: enough to see how a call must look."""
    parts, seen = [], ""
    for name, kind, required in parameters:
        if kind == "KEYWORD_ONLY" and seen not in ("VAR_POSITIONAL", "KEYWORD_ONLY"):
            parts.append("*")
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(kind, "")
        parts.append(f"{star}{name}" + ("" if required or star else "=…"))
        seen = kind
    return f"({', '.join(parts)})"


def read_signature(text: str) -> list[Parameter]:
    """The parameters of a signature kept as text, such as `(max_len, *, dtype=None) -> dict`."""
    found = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(found, ast.FunctionDef)
    a = found.args
    places: list[Parameter] = [(p.arg, "POSITIONAL_ONLY", True) for p in a.posonlyargs]
    places += [(p.arg, "POSITIONAL_OR_KEYWORD", True) for p in a.args]
    first = len(places) - len(a.defaults)
    places = [(n, k, i < first) for i, (n, k, _) in enumerate(places)]
    if a.vararg:
        places.append((a.vararg.arg, "VAR_POSITIONAL", False))
    places += [(p.arg, "KEYWORD_ONLY", d is None) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return [*places, (a.kwarg.arg, "VAR_KEYWORD", False)] if a.kwarg else places
