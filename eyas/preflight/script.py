"""Read a training script without running it: which modules it imports, which names it takes out of them, and
how it calls those.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from eyas.preflight.calls import Call
from eyas.preflight.finding import Subject, once

IMPORT_FAULTS, ANY_FAULT = {"ImportError", "ModuleNotFoundError"}, {"AttributeError", "Exception", "BaseException"}
FEATURE_TESTS = ("version", "hasattr", "find_spec", "is_available", "_available(")


@dataclass(frozen=True)
class Where:
    """The circumstances of a line. need: "always"; "conditional" on `condition`; "guarded" by a `try` (numbered
    `guard`) that goes on without it; "fallback" of such a try; "typing" when only type checkers read it."""

    need: str = "always"
    guard: int = 0
    condition: str = ""
    function: str = ""
    imports_only: bool = False  # the guard catches failed imports, and nothing else


@dataclass(frozen=True)
class Use:
    """Something taken from elsewhere: the module itself (`chain` empty) or a chain of names out of it."""

    module: str
    chain: tuple[str, ...]
    file: Path
    line: int
    text: str
    where: Where
    kind: str  # "import", "from" or "attribute"
    call: Call | None = None

    @property
    def at(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def name(self) -> str:
        return ".".join((self.module, *self.chain))


@dataclass
class Scope:
    """Names bound in a module, class or function. A binding is (module, chain), or None for anything else."""

    parent: "Scope | None"
    is_class: bool = False
    names: dict[str, list[tuple[str, tuple[str, ...]] | None]] = field(default_factory=dict)

    def bind(self, name: str, to: tuple[str, tuple[str, ...]] | None = None) -> None:
        self.names.setdefault(name, []).append(to)

    def look_up(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        scope: Scope | None = self
        while scope and (name not in scope.names or (scope.is_class and scope is not self)):
            scope = scope.parent
        bound = set(scope.names[name]) if scope else {None}
        return bound.pop() if len(bound) == 1 else None


class Script:
    """Raises SyntaxError when the file is not Python that this interpreter reads."""

    def __init__(self, file: Path):
        self.file, source = file, file.read_bytes()
        self.lines = source.decode("utf-8", "replace").splitlines()
        self.relative: list[tuple[int, str]] = []  # imports with leading dots: line, text
        self._imports: list[Use] = []
        self._later: list[tuple[ast.expr, ast.Call | None, Scope, Where]] = []
        tree = ast.parse(source, str(file))
        self.attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        self._walk([*tree.body], Scope(None), Where())

    @cached_property
    def uses(self) -> list[Use]:
        """In the order of the lines; names that could mean several things are left out."""
        found = list(self._imports)
        for node, call, scope, where in self._later:
            chain, root = [], node
            while isinstance(root, ast.Attribute):
                chain.append(root.attr)
                root = root.value
            bound = scope.look_up(root.id) if isinstance(root, ast.Name) else None
            if bound and (chain or call):
                module, first = bound
                names = (*first, *reversed(chain))
                taken = Call.of(call) if call else None
                if where.imports_only and where.need == "guarded":
                    where = replace(where, need="always")
                found.append(self._use(module, names, node.lineno, where, "attribute", taken))
        return sorted(found, key=lambda u: u.line)

    def _use(self, module, chain, line, where, kind, call=None) -> Use:
        text = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        return Use(module, chain, self.file, line, text, where, kind, call)

    def _walk(self, nodes: list[ast.AST], scope: Scope, where: Where) -> None:
        for node in nodes:
            self._visit(node, scope, where)

    def _visit(self, node: ast.AST, scope: Scope, where: Where) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    self._imports.append(self._use(alias.name, (), node.lineno, where, "import"))
                    if where.need != "fallback":
                        scope.bind(alias.asname or alias.name.split(".")[0], self._bound(alias))
            case ast.ImportFrom():
                self._import_from(node, scope, where)
            case ast.Try():
                self._try(node, scope, where)
            case ast.If(test=test):
                self._walk([test], scope, where)
                inner = self._under(test, where)
                self._walk([*node.body], scope, inner)
                self._walk([*node.orelse], scope, inner if inner.need != "typing" else where)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.bind(node.name)
                a = node.args
                self._walk([*node.decorator_list, *a.defaults, *(d for d in a.kw_defaults if d)], scope, where)
                inner = Scope(scope)
                for argument in ast.walk(a):
                    if isinstance(argument, ast.arg):
                        inner.bind(argument.arg)
                self._walk([*node.body], inner, replace(where, function=node.name))
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inner = Scope(scope)
                for part in ast.walk(node.args) if isinstance(node, ast.Lambda) else ():
                    if isinstance(part, ast.arg):
                        inner.bind(part.arg)
                self._walk([*ast.iter_child_nodes(node)], inner, where)
            case ast.ClassDef():
                scope.bind(node.name)
                self._walk([*node.decorator_list, *node.bases, *node.keywords], scope, where)
                self._walk([*node.body], Scope(scope, is_class=True), where)
            case ast.Call():
                self._dynamic(node, where)
                self._later.append((node.func, node, scope, where))
                inner = [] if isinstance(node.func, ast.Name | ast.Attribute) else [node.func]
                inner = self._base(node.func) or inner
                self._walk([*inner, *node.args, *node.keywords], scope, where)
            case ast.Attribute(ctx=ast.Load()):
                self._later.append((node, None, scope, where))
                self._walk(self._base(node), scope, where)
            case ast.Name(ctx=ast.Store() | ast.Del()):
                if where.need != "fallback":
                    scope.bind(node.id)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                scope.bind(name)
                self._walk([*ast.iter_child_nodes(node)], scope, where)
            case _:
                self._walk([*ast.iter_child_nodes(node)], scope, where)

    @staticmethod
    def _bound(alias: ast.alias) -> tuple[str, tuple[str, ...]]:
        """`import a.b` binds `a`; `import a.b as c` binds `a.b`."""
        return (alias.name if alias.asname else alias.name.split(".")[0], ())

    @staticmethod
    def _base(node: ast.AST) -> list[ast.AST]:
        """What a chain of attributes hangs on, unless that is a plain name."""
        chained = isinstance(node, ast.Attribute)
        while isinstance(node, ast.Attribute):
            node = node.value
        return [node] if chained and not isinstance(node, ast.Name) else []

    def _import_from(self, node: ast.ImportFrom, scope: Scope, where: Where) -> None:
        if node.level:
            self.relative.append((node.lineno, self.lines[node.lineno - 1].strip()))
        module = self._absolute(node.level, node.module or "")
        for alias in node.names if module else ():
            star = alias.name == "*"
            taken = () if star else (alias.name,)
            self._imports.append(self._use(module, taken, alias.lineno, where, "import" if star else "from"))
            if where.need != "fallback" and not star:
                scope.bind(alias.asname or alias.name, (module, taken))

    def _absolute(self, level: int, module: str) -> str:
        """The dotted name of a relative import, counted from the topmost folder that is a package."""
        folder, parts = self.file.resolve().parent, [module] if module else []
        for up in range(level):
            if not (folder / "__init__.py").is_file():
                return ".".join(parts)
            if up:
                folder = folder.parent
        while level and (folder / "__init__.py").is_file():
            parts.insert(0, folder.name)
            folder = folder.parent
        return ".".join(parts)

    def _try(self, node: ast.Try, scope: Scope, where: Where) -> None:
        about_imports = any(isinstance(n, ast.Import | ast.ImportFrom) for n in node.body)
        faults = IMPORT_FAULTS | ANY_FAULT if about_imports else IMPORT_FAULTS
        handlers = [h for h in node.handlers if caught(h) & faults]
        # A handler that ends in an exception does not go on without what is missing.
        goes_on = bool(handlers) and not any(ends(h.body) for h in handlers)
        body, rescue = where, where
        if goes_on and where.need in ("always", "conditional"):
            broad = any(caught(h) & ANY_FAULT for h in handlers)
            body = replace(where, need="guarded", guard=node.lineno, imports_only=not broad)
            rescue = replace(where, need="fallback", guard=node.lineno)
        self._walk([*node.body, *node.orelse], scope, body)
        for handler in node.handlers:
            self._visit(handler, scope, rescue if handler in handlers else where)
        self._walk([*node.finalbody], scope, where)

    @staticmethod
    def _under(test: ast.expr, where: Where) -> Where:
        text = ast.unparse(test)
        if "TYPE_CHECKING" in text:
            return replace(where, need="typing")
        if where.need != "always" or "__name__" in text:
            return where
        if any(word in text for word in FEATURE_TESTS):
            return replace(where, need="guarded", condition=text)
        return replace(where, need="conditional", condition=text)

    def _dynamic(self, node: ast.Call, where: Where) -> None:
        """`importlib.import_module("a.b")` and `__import__("a.b")`."""
        called, first = ast.unparse(node.func), node.args[0] if node.args else None
        dynamic = called in ("importlib.import_module", "import_module", "__import__")
        if dynamic and isinstance(first, ast.Constant) and not str(first.value).startswith("."):
            self._imports.append(self._use(str(first.value), (), node.lineno, where, "import"))


def caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).rpartition(".")[2] for kind in kinds}


def ends(body: list[ast.stmt]) -> bool:
    last = body[-1]
    leaves = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
    return isinstance(last, ast.Raise) or (
        leaves and ast.unparse(last.value.func) in ("sys.exit", "exit", "os._exit", "quit")  # type: ignore[attr-defined]
    )


def read_all(script: Path) -> Iterator[Script]:
    """The script, then every module that lies beside it and is imported, each once."""
    folder, waiting, seen = script.parent, [script], set()
    while waiting:
        file = waiting.pop(0)
        if file.resolve() in seen:
            continue
        seen.add(file.resolve())
        read = Script(file)
        yield read
        for use in read.uses:
            path = folder.joinpath(*use.module.split("."))
            beside = [path.with_suffix(".py"), path / "__init__.py"]
            if use.kind == "from":
                beside.append(path / f"{use.chain[0]}.py")
            waiting += [b for b in beside if b.is_file()]


@once
def scripts(s: Subject) -> list[Script]:
    """Raises SyntaxError."""
    assert s.script is not None
    return list(read_all(s.script))


def uses(s: Subject) -> list[Use]:
    return [use for script in scripts(s) for use in script.uses]


def tops(s: Subject, need: str = "") -> set[str]:
    """The packages the script imports (only those under `need`, if given); none when it cannot be read."""
    if s.script is None or not s.script.is_file():
        return set()
    try:
        return {use.module.split(".")[0] for use in uses(s) if need in ("", use.where.need)}
    except SyntaxError:
        return set()


def folder_of(s: Subject) -> Path:
    """What Python puts first on sys.path: the script's folder, or that above its package when run with -m."""
    assert s.script is not None
    folder = s.script.resolve().parent
    if scripts(s)[0].relative:
        while (folder / "__init__.py").is_file():
            folder = folder.parent
    return folder
