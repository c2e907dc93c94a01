"""What can be told of installed packages by reading their files, without importing them. Part of `_probe.py`:
standard library only, Python 3.9 is enough.
"""

import ast
import importlib.metadata
import importlib.util
import os
import platform
import sys
import sysconfig

SKIPPED = {"tests", "test", "testing", "__pycache__", "node_modules", "third_party"}


def tops(dist):
    """Top-level modules that a distribution provides."""
    listed = (dist.read_text("top_level.txt") or "").split()
    found = {name for name in listed if "/" not in name}
    for file in dist.files or [] if not found else []:
        first = file.parts[0] if file.parts else ""
        if first.endswith((".py", ".so", ".pyd")) and len(file.parts) == 1:
            found.add(first.split(".")[0])
        elif len(file.parts) > 1 and first.isidentifier():
            found.add(first)
    return found


def provider(top):
    """The distribution that a top-level module comes from."""
    return next((d for d in importlib.metadata.distributions() if top in tops(d)), None)


def facts(job):
    """The interpreter, its distributions, and where each module asked for would come from."""
    dists = {}
    for dist in importlib.metadata.distributions():
        name = dist.metadata["Name"]
        if name and name.lower() not in dists:  # the first on sys.path is the one that counts
            known = {"name": name, "version": dist.version, "requires": dist.requires or []}
            known["tops"], known["python"] = sorted(tops(dist)), dist.metadata["Requires-Python"]
            dists[name.lower()] = known
    sites = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    told: dict = {"version": platform.python_version(), "implementation": platform.python_implementation()}
    told.update(executable=sys.executable, prefix=sys.prefix, sites=sites, path=sys.path, dists=dists)
    told["modules"] = {name: origin(name) for name in job["modules"]}
    told["stdlib"] = sorted(getattr(sys, "stdlib_module_names", sys.builtin_module_names))
    return told


def origin(top):
    """[file or None, folder or None] of a top-level module; None when there is none."""
    try:
        spec = importlib.util.find_spec(top)
    except Exception:  # a half-removed package may raise anything
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or [])
    return [spec.origin, folders[0] if folders else None]


def sources(top):
    """(dotted name, file) of every module of a package, without importing any."""
    file, folder = origin(top) or [None, None]
    if folder is None:
        return [(top, file)] if file and file.endswith(".py") else []
    found = []
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(d for d in folders if d.isidentifier() and d not in SKIPPED)
        inner = os.path.relpath(at, folder)
        package = [top] + ([] if inner == "." else inner.split(os.sep))
        for name in sorted(files):
            if name.endswith(".py") and name[:-3].isidentifier():
                parts = package + ([] if name == "__init__.py" else [name[:-3]])
                found.append((".".join(parts), os.path.join(at, name)))
    return found


def read(file):
    with open(file, encoding="utf-8", errors="replace") as source:
        return source.read()


def parse(text):
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def locate(job):
    """Where the names asked for are defined or re-exported in a package; and which modules it has."""
    found, modules = {name: [] for name in job["names"]}, []
    for module, file in sources(job["top"]):
        modules.append(module)
        text = read(file)
        if any(name in text for name in job["names"]):
            for name, entry in exported(module, file, parse(text), "").items():
                if name in found:
                    found[name].append([module, entry["kind"]])
    return {"found": found, "modules": modules}


def record(job):
    """The public contract of a package: names, signatures, notes beside parameters, of the modules under `of`
    (`a.b` with all below it; `a.b.__init__`, that module alone)."""
    modules = {}
    for module, file in sources(job["top"]):
        hidden = any(part.startswith("_") for part in module.split("."))
        wanted = any((module + ".").startswith(prefix + ".") for prefix in job["of"])
        if not hidden and (wanted or module + ".__init__" in job["of"]):
            text = read(file)
            names = exported(module, file, parse(text), text)
            kept = {n: e for n, e in sorted(names.items()) if not n.startswith("_") and own(e, job["top"])}
            if "__getattr__" in names or "__STAR__" in names:
                kept["*"] = {"kind": "dynamic"}
            modules[module] = kept
    found = provider(job["top"])
    return {"modules": modules, "version": found and found.version}


def own(entry, top):
    """Not merely a name that the module imports from another package for itself."""
    return entry["kind"] != "import" or (entry["from"] + ".").startswith(top + ".")


def exported(module, file, tree, text):
    """name -> what it is, for everything at the top level of a module (also inside `if` and `try`)."""
    package = module if os.path.basename(file) == "__init__.py" else module.rpartition(".")[0]
    lines, found = text.splitlines(), {}
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = function(node, lines)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = klass(node, lines)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                found.update({n.id: value(node.value) for n in names if isinstance(n, ast.Name)})
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(up + ([node.module] if node.module else []))
            for alias in node.names:
                name = "__STAR__" if alias.name == "*" else alias.asname or alias.name
                found.setdefault(name, {"kind": "import", "from": f"{base}.{alias.name}"})
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found.setdefault(alias.asname, {"kind": "import", "from": alias.name})
        elif isinstance(node, (ast.If, ast.Try)):
            waiting[:0] = node.body + node.orelse
            waiting += [n for h in getattr(node, "handlers", []) for n in h.body]
    return found


def value(node):
    """What a name is set to, where that is a promise: the choices of a Literal."""
    text = ast.unparse(node) if isinstance(node, ast.Subscript) else ""
    return {"kind": "value", "text": text} if text.startswith("Literal[") else {"kind": "value"}


def function(node, lines, method=False):
    entry: dict = {"kind": "function", "signature": signature(node, method)}
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    # A comment beside a parameter tells its shape where annotations cannot.
    notes = {a.arg: lines[a.lineno - 1].partition("#")[2].strip() for a in arguments if a.lineno <= len(lines)}
    if notes := {name: note for name, note in notes.items() if note and not note.startswith("noqa")}:
        entry["notes"] = notes
    return entry


def signature(node, method):
    arguments = node.args
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if method and not static and (arguments.posonlyargs or arguments.args):
        (arguments.posonlyargs or arguments.args).pop(0)  # self or cls
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returned}"


def klass(node, lines):
    """A class: bases, what it takes to make one (None when that is inherited), its public methods."""
    entry = {"kind": "class", "bases": [ast.unparse(b) for b in node.bases], "signature": None}
    methods, fields = {}, []
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            known = function(item, lines, method=True)
            if item.name == "__init__":
                entry["signature"] = known["signature"]
            elif not item.name.startswith("_") or item.name == "__call__":
                methods[item.name] = {k: v for k, v in known.items() if k in ("signature", "notes")}
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            kind = ast.unparse(item.annotation)
            if not item.target.id.startswith("_") and not kind.startswith("ClassVar"):
                default = "" if item.value is None else f" = {ast.unparse(item.value)}"
                fields.append(f"{item.target.id}: {kind}{default}")
    decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
    if "dataclass" in decorators:
        star = "*, " if "kw_only=True" in decorators and fields else ""
        entry["signature"] = f"({star}{', '.join(fields)})"
    elif fields:
        entry["fields"] = fields
    return {**entry, "methods": methods}
