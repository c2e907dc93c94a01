"""Scripts with one fault each, in an interpreter of their own; and healthy ones, of which nothing is said."""

import os
import sys
import time
from pathlib import Path

import pytest

from eyas.preflight import imports
from tests.preflight.workshop import KIT, Fault, expect, names, of, write

GUARDED = "try:\n    {}\nexcept ImportError:\n    {}\n"
FAULTS = [
    # the script itself
    Fault("syntax error", "script", "train.py:2: not valid for Python 3", "mend line 2", "import kit\nx = (1,\n"),
    Fault("relative import", "script", "a script has no package: `from .data import x` fails",
          "write `from data import x`", "from .data import x\n", {"../work/data.py": "x = 1\n"}),
    Fault("file beside hides a package", "shadows",
          "`kit` is kit.py beside the script, which hides the installed kit 1.0", "rename kit.py",
          files={"../work/kit.py": "Config = 1\n"}),
    Fault("file beside hides the standard library", "shadows", "`queue` is queue.py beside the script",
          "rename queue.py", "import queue\n", {"../work/queue.py": "Queue = 1\n"}),
    # modules that are not there
    Fault("package not installed", "modules", "train.py:1: `nokit` is not installed for",
          "-m pip install nokit`", "import nokit\n"),
    Fault("known under another name", "modules", "`yaml` is not installed", "pip install pyyaml`",
          "import yaml\n"),
    Fault("module not in the package", "modules", "train.py:2: kit 1.0 has no module `kit.batching`",
          "`from kit.data.loader import make_batch`", "import kit\nfrom kit.batching import make_batch\n"),
    Fault("module misspelt", "modules", "kit 1.0 has no module `kit.confg`", "it has kit.config",
          "import kit.confg\n"),
    Fault("named by import_module", "modules", "`nokit` is not installed", "pip install nokit",
          "import importlib\nm = importlib.import_module('nokit')\n"),
    Fault("only needed inside a function", "modules", "train.py:2: `nokit` is not installed",
          "pip install nokit", "def save():\n    import nokit\n"),
    Fault("both ways of a try are shut", "modules", "train.py:4: `nokit` is not installed", "pip install nokit",
          GUARDED.format("import fastkit", "import nokit")),
    Fault("guard that raises", "modules", "train.py:2: `fastkit` is not installed", "pip install fastkit",
          GUARDED.format("import fastkit", "raise SystemExit('no fastkit')")),
    Fault("only under a condition", "modules", "`nokit` is not installed for", "pip install nokit",
          "import sys\nif sys.argv[1:]:\n    import nokit\n", level="warning"),
    Fault("guarded, installed and broken", "modules", "needs `depend`, which is not installed",
          "pip install depend", GUARDED.format("import kit", "kit = None"),
          {"kit/__init__.py": "import depend\n"}, "warning"),
    Fault("guarded by what does not catch it", "modules", "raises ValueError: bad", "mend what it says",
          GUARDED.format("import kit", "kit = None"), {"kit/__init__.py": "raise ValueError('bad')\n"}),
    Fault("only for type checkers", "modules", "`nokit` is not installed", "pip install nokit",
          "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nokit\n", level="info"),
    # modules that do not import
    Fault("raises", "modules", "importing `kit.config` raises RuntimeError: no licence at", "mend what it says",
          "import kit.config\n", {"kit/__init__.py": "", "kit/config.py": "raise RuntimeError('no licence')\n"}),
    Fault("hangs", "modules", "importing `kit.config` hangs: not done after 2 s", "--import-limit",
          "import kit.config\n", {"kit/__init__.py": "", "kit/config.py": "import time\ntime.sleep(60)\n"}),
    Fault("segfaults", "modules", "importing `kit` crashes the interpreter: it was killed by SIGSEGV at",
          "reinstall kit 1.0", files={"kit/__init__.py": "import ctypes\nctypes.string_at(0)\n"}),
    Fault("aborts", "modules", "it was killed by SIGABRT at", "reinstall kit 1.0",
          files={"kit/__init__.py": "import os\nos.abort()\n"}),
    Fault("runs out of memory", "modules", "it was killed by SIGKILL (out of memory?)", "for want of memory",
          files={"kit/__init__.py": "import os\nos.kill(os.getpid(), 9)\n"}),
    Fault("ends the process", "modules", "importing `kit` ended the process with exit code 3",
          "must not end the process", files={"kit/__init__.py": "import os\nos._exit(3)\n"}),
    Fault("calls sys.exit", "modules", "importing `kit` calls sys.exit(2) at", "__main__",
          files={"kit/__init__.py": "import sys\nsys.exit(2)\n"}),
    Fault("cannot be read by this Python", "modules", "cannot read it: invalid syntax", "needs another Python",
          files={"kit/__init__.py": "x = = 1\n"}),
    Fault("needs what is not installed", "modules", "importing `kit` needs `depend`, which is not installed",
          "pip install depend`", files={"kit/__init__.py": "import depend\n"}),
    Fault("wants a name that a library lost", "modules",
          "kit 1.0 wants `gone` from `lib`, which lib 2.0 does not have", "kit 1.0 asks for lib<2: `",
          files={"kit/__init__.py": "from lib import gone\n", "lib/__init__.py": "",
          "lib-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: lib\nVersion: 2.0\n",
          "kit-1.0.dist-info/METADATA": KIT["kit-1.0.dist-info/METADATA"] + "Requires-Dist: lib<2\n"}),
    Fault("wants a module that a library lost", "modules",
          "kit 1.0 wants the module `lib.old`, which lib 2.0 does not have", "pip install 'lib<2'",
          files={"kit/__init__.py": "import lib.old\n", "lib/__init__.py": "",
          "lib-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: lib\nVersion: 2.0\n"}),
    Fault("goes round in a circle", "modules", "goes round in a circle: `A` of `kit.a` is not there yet",
          "inside the function", files={"kit/__init__.py": "from kit.a import A\n",
          "kit/a.py": "from kit.b import B\nA = 1\n", "kit/b.py": "from kit.a import A\nB = 1\n"}),
    Fault("library that does not load", "modules", "fails in compiled code: libcudart.so.11: cannot open",
          "reinstall kit",
          files={"kit/__init__.py": "raise ImportError('libcudart.so.11: cannot open shared object file')\n"}),
    # modules that do more than be imported
    Fault("prints", "modules", "importing `kit` prints: Welcome to kit!", "use logging",
          files={"kit/__init__.py": "print('Welcome to kit!')\n"}, level="warning"),
    Fault("writes to stderr", "modules", "importing `kit` writes to stderr: careful", "",
          files={"kit/__init__.py": "import sys\nsys.stderr.write('careful')\n"}, level="info"),
    Fault("leaves a thread", "modules", "starts threads that keep the process alive: kit-poll", "as daemons",
          files={"kit/__init__.py": "import threading, time\n"
                 "threading.Thread(target=time.sleep, args=(60,), name='kit-poll').start()\n"},
          level="warning"),
    Fault("leaves a process", "modules", "importing `kit` starts 1 processes", "in a function",
          files={"kit/__init__.py": "import subprocess, sys\n"
                 "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"},
          level="warning"),
    Fault("takes memory", "modules", "importing `kit` takes 0.2 GB of memory", "in a function",
          files={"kit/__init__.py": "block = b'x' * 200_000_000\n"}, level="warning"),
    Fault("takes GPU memory", "modules", "importing `kit` takes GPU memory: 3.00 GB and a CUDA context",
          "in a function", files={"kit/__init__.py": "import torch\ntorch.cuda.ready = True\n",
          "torch.py": "class cuda:\n    ready = False\n    is_initialized = classmethod(lambda c: c.ready)\n"
          "    memory_reserved = staticmethod(lambda: 3 * 10**9)\n"},
          level="warning"),
    Fault("sets CUDA_VISIBLE_DEVICES", "modules", "sets CUDA_VISIBLE_DEVICES to '0'", "the launcher's to say",
          files={"kit/__init__.py": "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"}, level="warning"),
    Fault("changes the folder", "modules", "changes the working folder to /", "full paths",
          files={"kit/__init__.py": "import os\nos.chdir('/')\n"}, level="warning"),
    Fault("module deprecated", "modules", "deprecated: kit is now newkit", "before it is removed",
          files={"kit/__init__.py": "import warnings\n"
                 "warnings.warn('kit is now newkit', DeprecationWarning, stacklevel=2)\n"},
          level="warning"),
    # names
    Fault("package whose __init__ exports nothing", "names",
          "train.py:1: `kit.data` (kit 1.0) exposes nothing named `make_batch`",
          "it is in kit.data.loader: `from kit.data.loader import make_batch`",
          "from kit.data import make_batch\n"),
    Fault("attribute of an alias", "names",
          "train.py:4: `kit.data` (kit 1.0) exposes nothing named `make_batch`",
          "it is in kit.data.loader: `from", "import kit.data as td\n\ndef main():\n    td.make_batch([], 8)\n"),
    Fault("name misspelt", "names", "exposes nothing named `make_bach`", "did you mean make_batch?",
          "import kit.data.loader\nkit.data.loader.make_bach([], 8)\n"),
    Fault("submodule that nothing imports", "names", "`kit.data.loader` is a module that nothing imports",
          "add `import kit.data.loader`", "import kit.data\nf = kit.data.loader.make_batch\n"),
    Fault("method that is not there", "names", "`kit.Config` (kit 1.0) exposes nothing named `load`",
          "pydoc kit.Config", "from kit import Config\nConfig.load('x')\n"),
    Fault("name left the standard library", "names", "`collections` (Python 3", "this Python no longer has it",
          "from collections import Mapping\n"),
    Fault("name deprecated", "names", "`kit.old` is deprecated: kit.old is kit.new now", "before it is removed",
          "from kit import old\n",
          {"kit/__init__.py": "import warnings\ndef __getattr__(name):\n    if name == 'old':\n"
          "        warnings.warn('kit.old is kit.new now', DeprecationWarning, 2)\n"
          "        return 1\n    raise AttributeError(name)\n"},
          "warning"),
    Fault("name marked deprecated", "names", "`kit.old` is deprecated: use new", "before it is removed",
          "from kit import old\n", {"kit/__init__.py": "def old(): ...\nold.__deprecated__ = 'use new'\n"},
          "warning"),
    Fault("in a module beside the script", "names",
          "helper.py:1: `kit.data` (kit 1.0) exposes nothing named `make_batch`",
          "from kit.data.loader import make_batch", "import helper\n",
          {"../work/helper.py": "from kit.data import make_batch\n"}),
    Fault("in a package that does not import", "names", "`kit.config` (kit 1.0) exposes nothing named `Confg`",
          "did you mean Config?", "from kit.config import Confg\n", {"kit/__init__.py": "import depend\n"}),
    # calls
    Fault("too many arguments", "calls", "`kit.Config` takes 1 positional argument, 2 are given",
          "in kit 1.0 it is `Config(size, *, depth=…)`", "from kit import Config\nConfig(8, 2)\n"),
    Fault("unknown keyword", "calls", "train.py:2: `kit.Config` has no parameter `width`",
          "`Config(size, *, depth=…)`", "import kit\nkit.Config(8, width=2)\n"),
    Fault("argument missing", "calls", "`kit.data.loader.make_batch` needs `max_len`, which is not given",
          "make_batch(samples, max_len, pad=…)", "from kit.data import loader\nloader.make_batch([])\n"),
    Fault("argument given twice", "calls", "gets `samples` twice", "make_batch(samples",
          "from kit.data.loader import make_batch\nmake_batch([], 8, samples=[])\n"),
    Fault("keyword ignored without a word", "calls", "has no parameter `dept`: it is ignored without a word",
          "Config(", "from kit import Config\nConfig(size=1, dept=2)\n",
          {"kit/config.py": "class Config:\n    model_fields = {}\n    model_config = {}\n"
          "    def __init__(self, *, size=1): ...\n"},
          "warning"),
]  # fmt: skip


@names(FAULTS)
def test_each_fault_is_found_and_its_cure_named(fault, work, monkeypatch):
    monkeypatch.setattr(imports, "MEMORY", 100_000_000)
    write(work.site, fault.files)
    limit = 2.0 if fault.name == "hangs" else 30.0
    expect(work.check(fault.script, import_limit=limit), fault)


HEALTHY = {
    "plain": "import kit\nfrom kit.data.loader import make_batch as mb\n"
    "mb([], 8)\nmb([], max_len=8, pad=1)\nkit.Config(3)\n",
    "stars": "from kit.data.loader import *\nimport kit\n"
    "a, k = [[], 8], {}\nkit.data.loader.make_batch(*a, **k)\n",
    "guarded": "try:\n    import nokit\nexcept ImportError:\n    nokit = None\n"
    "if nokit:\n    nokit.f(1)\nimport kit\n",
    "fallback": "try:\n    from kit.new import Config\nexcept ImportError:\n"
    "    from kit import Config\nConfig(2)\n",
    "versions": "import kit\nif hasattr(kit, 'fast'):\n    kit.fast(1)\n",
    "types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kit.none import X\nimport kit\n",
    "other scopes": "import kit\ndef f(kit):\n    return kit.anything(1, 2)\n"
    "[kit.x for kit in []]\nlambda kit: kit.y\n",
    "rebound": "import kit\nfrom kit import Config\nConfig = make = print\nConfig(1, 2, 3, 4)\n",
    "own class": "import kit\nclass Config(kit.Config):\n    def __init__(self): super().__init__(1)\nConfig()\n",
    "beside": "import helper\nfrom helper import f\nf(1)\nhelper.f(2)\n",
    "submodule": "from kit import data\nfrom kit.data import loader\n"
    "loader.make_batch([], 1)\ndata.loader.make_batch([], 1)\n",
    "standard library": "import os.path, json as j, collections.abc\nj.dumps(1, indent=2)\n",
    "builtin without signature": "import math, itertools\nmath.hypot(1, 2, 3)\nitertools.chain([], [])\n",
    "match": "import kit\nmatch kit:\n    case object(x=kit): kit.none(1)\n    case _: pass\n",
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_scripts_pass(name, work):
    write(work.folder / "work", {"helper.py": "def f(x): ...\n"})
    found = work.check(HEALTHY[name])
    assert of(found, "error", "warning") == []
    assert {f["check"] for f in found} >= {"script", "modules", "names", "calls"}


def test_a_package_is_read_and_imported_from_above_its_folder(work):
    write(work.folder / "work", {"__init__.py": "", "helper.py": "def f(x): ...\n"})
    found = work.check("from .helper import f\nf(1, 2)\n")
    (warned,) = of(found, "warning")
    assert "works only as part of a package" in warned["message"] and "python -m work.train" in warned["hint"]
    (wrong,) = of(found, "error")
    assert "`work.helper.f` takes 1 positional argument, 2 are given" in wrong["message"]


def test_the_script_is_never_run_and_nothing_is_written_beside_it(work):
    write(work.folder / "work", {"helper.py": "x = 1\n"})
    found = work.check("import helper\nopen('ran', 'w')\nraise SystemExit('ran')\n")
    assert of(found, "error") == []
    assert sorted(p.name for p in (work.folder / "work").iterdir()) == ["helper.py", "train.py"]


def test_modules_are_tried_in_the_order_config_model_data_and_the_rest(work):
    write(
        work.site, {f"kit/{n}.py": "raise ValueError(__name__)\n" for n in ("utils", "data2", "model", "config")}
    )
    write(work.site, {"kit/__init__.py": ""})
    found = work.check("import kit.utils, kit.data2, kit.model, kit.config\n")
    tried = [f["message"].split("`")[1] for f in of(found, "error")]
    assert tried == ["kit.config", "kit.model", "kit.data2", "kit.utils"]


def test_one_cause_is_said_once_for_all_modules_of_a_package(work):
    write(work.site, {"kit/__init__.py": "import depend\n"})
    found = work.check("import kit.config\nimport kit.data\nfrom kit.data import loader\n")
    (only,) = of(found, "error")
    assert "needs `depend`" in only["message"] and "asked for at" in only["message"]


def test_a_process_left_behind_by_an_import_is_ended(work):
    starts = "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    notes = "open(os.environ['PIDFILE'], 'w').write(str(p.pid))\n"
    write(work.site, {"kit/__init__.py": f"import os, subprocess, sys\n{starts}{notes}"})
    pidfile = work.folder / "pid"
    os.environ["PIDFILE"] = str(pidfile)
    try:
        start = time.monotonic()
        work.check("import kit\n")
        assert time.monotonic() - start < 20
    finally:
        del os.environ["PIDFILE"]
    state = Path("/proc", pidfile.read_text(), "stat")
    for _ in range(50):
        if not state.is_file() or state.read_text().split(") ")[1][0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("it is still there")


def test_evidence_names_file_line_and_interpreter(work):
    (found,) = of(work.check("\n\nfrom kit.data import make_batch\n"), "error")
    evidence = found["evidence"]
    assert evidence["line"] == 3 and evidence["file"].endswith("train.py") and evidence["python"] == work.python
    assert evidence["name"] == "kit.data.make_batch" and evidence["lines"] == [3]


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python", "cannot be started: No such file"),
        ("/bin/ls", "is no Python 3.9 or newer that can be asked"),
    ],
)
def test_an_interpreter_that_is_none_is_named_and_nothing_else_is_tried(work, python, said):
    work.python = python
    found = work.check("import kit\n", ("environment", "imports"))
    wrong = [f for f in of(found, "error") if f["check"] == "python"]
    assert said in wrong[0]["message"] and "--python .venv/bin/python" in wrong[0]["hint"]
    assert [f["message"] for f in found if f["check"] == "modules"] == ["skipped: script was skipped"]


def test_a_script_that_is_not_there(work):
    from eyas.preflight.finding import Subject
    from eyas.preflight.runner import run_preflight

    result = run_preflight(Subject(script=Path("no.py"), python=work.python), ["imports"])
    assert "there is no script no.py" in result["stages"][0]["findings"][0]["message"]


@pytest.mark.slow
def test_the_example_script_is_healthy():
    from eyas.preflight.finding import Subject
    from eyas.preflight.runner import run_preflight

    script = Path(__file__).parents[2] / "examples" / "train_script.py"
    result = run_preflight(Subject(script=script, python=sys.executable), ["imports"])
    assert of(result["stages"][0]["findings"], "error", "warning") == []
