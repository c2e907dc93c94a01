"""Contracts: what is recorded of a package, how a script is dated by it, and what is said when it drifts."""

import json
from pathlib import Path

import pytest

from eyas.cli import run
from eyas.preflight import contract
from eyas.preflight.contract import RECORDED, changed, load
from eyas.preflight.finding import Subject
from eyas.preflight.runner import run_preflight
from tests.preflight.workshop import Fault, expect, names, of, write

MODULE = """
from typing import Literal
Mode = Literal["fast", "exact"]

def make_batch(
    samples: list,  # shape: [T, 3 * H]
    max_len: int,
    pad: int = 0,
) -> dict: ...

class Model:
    def __init__(self, config, t2d=None): ...
    def forward(self, hidden, lengths=None): ...
    @staticmethod
    def read(path): ...
"""
SCRIPT = "from kit.core import Mode, Model, make_batch\nmake_batch([], 8)\nmodel = Model({})\nmodel.read('x')\n"


def drift(name: str, message: str, old: str, new: str, cure: str = "still means the same", **options) -> Fault:
    """A release 2.0 of kit in which `old` reads `new`."""
    assert old in MODULE
    files = {"kit/core.py": MODULE.replace(old, new), "kit-1.0.dist-info/METADATA": "Name: kit\nVersion: 2.0\n"}
    return Fault(name, "drift", message, cure, SCRIPT, files, "warning", **options)


FAULTS = [
    drift("default changed", "kit 1.0 to 2.0: `kit.core.make_batch` `pad` defaults to -1, not 0", "int = 0",
          "int = -1"),
    drift("result changed", "`kit.core.make_batch` returns list[dict], not dict", "-> dict", "-> list[dict]"),
    drift("shape changed", "`samples` is now shape: [T, A * H], not shape: [T, 3 * H]", "[T, 3 * H]",
          "[T, A * H]"),
    drift("parameters changed places", "parameters changed places", "config, t2d=None", "t2d=None, config=None"),
    drift("optional parameter gone", "`kit.core.Model` no longer takes `t2d`", "config, t2d=None", "config"),
    drift("method needs more", "`kit.core.Model.forward` needs `document_ids`, no longer takes `lengths`",
          "hidden, lengths=None", "hidden, document_ids"),
    drift("method changed", "`kit.core.Model.read` no longer takes `path`", "read(path)", "read(*paths)"),
    drift("class became a function", "was a class, is a function", MODULE[MODULE.index("class Model") :],
          "def Model(config): ...\n"),
    drift("choice gone", "`kit.core.Mode` was Literal['fast', 'exact'], is Literal['fast']", '["fast", "exact"]',
          '["fast"]'),
]  # fmt: skip


@pytest.fixture
def recorded(work):
    """kit 1.0 as it was when the script was written, recorded beside it."""
    write(work.site, {"kit/core.py": MODULE})
    out = work.folder / "work" / "contracts" / "kit-1.0.json"
    contract.record(["kit"], work.python, out)
    return out


@names(FAULTS)
def test_each_drift_is_found_and_the_line_named(fault, work, recorded):
    write(work.site, fault.files)
    expect(work.check(fault.script), fault)


def test_an_unchanged_package_has_not_drifted(work, recorded):
    (found,) = [f for f in work.check(SCRIPT) if f["check"] == "drift"]
    assert found["level"] == "info" and "as 1.0 did, which it fits" in found["message"]


def test_a_script_is_dated_by_the_newest_release_that_has_all_it_uses(work, recorded):
    for version, text in (("2.0", MODULE.replace("make_batch", "collate")), ("3.0", "")):
        write(work.site, {"kit/core.py": text, "kit-1.0.dist-info/METADATA": f"Name: kit\nVersion: {version}\n"})
        contract.record(["kit"], work.python, recorded.with_name(f"kit-{version}.json"))
    found = work.check(SCRIPT)
    (dated,) = [f for f in of(found, "warning") if "is written for" in f["message"]]
    assert "train.py is written for kit 1.0, 3.0 is installed" in dated["message"]
    assert "pip install kit==1.0` brings all of it back" in dated["hint"]
    lost = [f for f in of(found, "error") if f["check"] == "names"]
    assert "kit 1.0 had this: `pip install kit==1.0`" in lost[2]["hint"]
    assert "kit 1.0 to 2.0 had this: `pip install kit==2.0`" in lost[1]["hint"]


def test_a_missing_package_is_asked_for_in_the_release_the_script_fits(work, recorded):
    for file in (work.site / "kit-1.0.dist-info").iterdir():
        file.unlink()
    (work.site / "kit").rename(work.folder / "away")
    found = [f for f in of(work.check(SCRIPT), "error") if f["check"] == "modules"]
    assert "-m pip install kit==1.0`" in found[0]["hint"]


def test_a_script_that_no_recorded_release_fits_is_said_so(work, recorded):
    (found,) = [f for f in of(work.check(SCRIPT + "Model(1, 2, 3)\n"), "warning") if f["check"] == "drift"]
    assert "no recorded release of kit has every name as" in found["message"]


def test_a_file_that_is_no_contract_is_named(work, recorded):
    recorded.write_text("{}")
    (found,) = [f for f in of(work.check(SCRIPT), "error") if f["check"] == "drift"]
    assert "kit-1.0.json is no contract" in found["message"] and "eyas contracts record" in found["hint"]


def test_what_a_contract_holds(work, recorded):
    (made,) = load(recorded.parent)
    assert (made.package, made.version, made.of) == ("kit", "1.0", ("kit",))
    batch = made.look_up("kit.core.make_batch")
    assert batch and batch["signature"] == "(samples: list, max_len: int, pad: int=0) -> dict"
    assert batch["notes"] == {"samples": "shape: [T, 3 * H]"}
    assert made.find("kit", ("Config",)) == made.find("kit.config", ("Config",))  # followed to where it is from
    assert made.find("kit.core", ("none",)) is None and made.find("other", ("x",)) == {"kind": "unknown"}
    assert made.find("kit", ("data", "loader", "make_batch"))


def test_names_made_when_asked_for_are_unknown_not_missing(work):
    write(
        work.site,
        {"kit/__init__.py": "def __getattr__(name): return 1\n", "kit/core.py": "from kit.data.loader import *\n"},
    )
    made = contract.read_installed(work.python, "kit", ("kit",), work.folder)
    assert made.look_up("kit.anything") == made.look_up("kit.core.make_batch") == {"kind": "unknown"}


@pytest.mark.parametrize(("old", "new", "said"), [
    ("(a, b=1)", "(a, b=1, c=2)", []), ("(a)", "(a, **k)", []), ("(a, *, b)", "(a, *, b, c)", ["needs `c`"]),
    ("(a, b)", "(b, a)", ["parameters changed places"]), ("() -> int", "()", [])])  # fmt: skip
def test_only_what_matters_to_a_caller_is_a_change(old, new, said):
    assert list(changed({"kind": "function", "signature": old}, {"kind": "function", "signature": new})) == said


# What the real packages have, as their wheels say: first and last release of each name.
LIVES = {
    "speculators.models.eagle3.core.Eagle3DraftModel": ("0.3.0", "0.9.0"),
    "speculators.train.data.create_collate_fn": ("0.3.0", "0.6.0"),
    "speculators.train.data.CollateFn": ("0.7.0", "0.9.0"),
    "speculators.train.data.Eagle3SampleFileDataset": ("0.3.0", "0.4.0"),
    "speculators.train.data.standardize_data_v0": ("0.3.0", "0.3.0"),
    "speculators.train.data.shift_batch": ("0.3.0", "0.4.0"),
    "speculators.models.eagle3.shift_batch": ("0.5.0", "0.9.0"),
    "speculators.train.noise_transforms.AddUniformNoise": ("0.3.0", "0.8.0"),
}


@pytest.mark.parametrize("name", LIVES)
def test_recorded_releases_of_speculators(name):
    having = [c.version for c in load(RECORDED) if c.package == "speculators" and c.look_up(name)]
    assert (having[0], having[-1]) == LIVES[name]


def test_changes_name_recorded_things_and_releases():
    releases = [c for c in load(RECORDED) if c.package == "speculators"]
    for note in json.loads((RECORDED / "changes" / "speculators.json").read_text()):
        assert note["since"] in [c.version for c in releases]
        assert any(c.look_up(note["name"]) for c in releases), note["name"]
        gone = releases[-1].look_up(note["name"]) is None
        assert gone != ("still" in note), note["name"]


def fake_engine(folder: Path, name: str, version: str, without: str = "") -> None:
    """An engine of empty parts: as many names as are needed, but for one."""
    from eyas.preflight.engine import NEEDS

    modules: dict[str, str] = {}
    for need in NEEDS[name]:
        parts = need.split(".")
        at = next(i for i, part in enumerate(parts) if part[0].isupper())
        methods = "".join(f"    def {m}(self, *args, **kwargs): ...\n" for m in parts[at + 1 :]) or "    pass\n"
        path = "/".join(parts[:at])
        modules[path] = modules.get(path, "") + (f"class {parts[at]}:\n{methods}" if parts[at] != without else "")
        for i in range(1, at):
            modules.setdefault("/".join(parts[:i]) + "/__init__", "")
    files = {f"{path}.py": text for path, text in modules.items()}
    meta = {f"{name}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n"}
    write(folder, files | meta | {f"{name}-{version}.dist-info/top_level.txt": name})


def engine(work, name: str) -> list[dict]:
    result = run_preflight(Subject(engine=name, python=work.python), ["imports"])
    return [f for stage in result["stages"] for f in stage["findings"]]


def test_an_engine_that_is_not_installed(work):
    (found,) = engine(work, "sglang")
    assert (
        found["level"] == "error"
        and "sglang is not installed for" in found["message"]
        and "--python" in found["hint"]
    )


def test_an_engine_too_old_for_extraction(work):
    fake_engine(work.site, "vllm", "0.14.0", without="ExampleHiddenStatesConnector")
    (found,) = of(engine(work, "vllm"), "error")
    assert "vllm 0.14.0 has no" in found["message"] and "no writing hidden states to files" in found["message"]
    assert "vllm 0.20.2, 0.26.0, 0.32.0 have it" in found["hint"]


def test_an_engine_newer_than_any_recorded_with_another_loader(work):
    fake_engine(work.site, "sglang", "0.9.0")
    found = of(engine(work, "sglang"), "warning")
    assert any("(loading a draft) is not as in sglang 0.5.23" in f["message"] for f in found)
    assert all("tested: 0.5.12, 0.5.23" in f["hint"] for f in found)


def test_an_engine_whose_loader_does_not_import(work):
    fake_engine(work.site, "sglang", "0.5.23")
    write(work.site, {"sglang/srt/models/llama_eagle3.py": "import flashkit\nclass LlamaForCausalLMEagle3:\n"
                      "    def load_weights(self, weights): ...\n"})  # fmt: skip
    (found,) = of(engine(work, "sglang"), "error")
    assert "sglang 0.5.23: importing `sglang.srt.models.llama_eagle3` needs `flashkit`" in found["message"]


def test_commands(work, capsys, monkeypatch):
    monkeypatch.chdir(work.folder)
    assert run(["contracts", "record", "kit", "--python", work.python, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == "contracts/kit-1.0.json"
    assert run(["contracts", "record", "nokit", "--python", work.python, "--quiet"]) == 1
    write(work.folder, {"good.py": "import kit\n", "bad.py": "from kit.data import make_batch\n"})
    for name, code in (("good.py", 0), ("bad.py", 1)):
        given = ["--script", name, "--python", work.python, "--stage", "imports", "--json", "--quiet"]
        assert run(["preflight", *given]) == code
        assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)
    assert run(["preflight", "--quiet"]) == 2
