"""Scripts of two ages with the real speculators of two ages, from PyPI."""

import subprocess
import sys
from pathlib import Path

import pytest

from eyas.preflight.finding import Subject
from eyas.preflight.runner import run_preflight
from tests.preflight.workshop import bare_python, of, write

OLD_SCRIPT = """import torch
from torch.utils.data import DataLoader

import speculators.train.data as td
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.train.data import Eagle3SampleFileDataset, split_files

def main():
    train, _ = split_files("features", ratio=0.9)
    data = Eagle3SampleFileDataset(2048, file_list=train, standardize_fn=td.standardize_data_v0)
    loader = DataLoader(data, batch_size=8, collate_fn=td.create_collate_fn(2048))
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(), torch.load("t2d.pt"), torch.load("d2t.pt"))
    for batch in loader:
        model(**batch, ttt_steps=3)
"""
NEW_SCRIPT = """import torch
from torch.utils.data import DataLoader

from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
from speculators.train.data import ArrowDataset, CollateFn

data = ArrowDataset(2048, datapath="data", split="train")
loader = DataLoader(data, batch_size=8, collate_fn=CollateFn(2048, 4096, preprocess=shift_batch))
model = Eagle3DraftModel(Eagle3SpeculatorConfig())
model.load_vocab_mappings(torch.load("t2d.pt"), torch.load("d2t.pt"))
for batch in loader:
    model(**batch, ttt_steps=3)
"""
# Beside speculators itself: what it needs and this environment lacks, or has too new.
NEEDED = {
    "0.3.0": ["transformers==4.57.*", "huggingface-hub<1", "tokenizers<0.23", "loguru", "pydantic-settings",
              "python-dotenv"],
    "0.9.0": ["hs-connectors==0.9.0", "openai", "httpx", "httpcore", "distro", "jiter", "sniffio", "loguru",
              "pydantic-settings", "python-dotenv"],
}  # fmt: skip


def real_python(version: str) -> str:
    """An interpreter with the real speculators `version` from PyPI, which skips the test when it cannot be had.

    A full install would fetch gigabytes of torch. So `pip install --no-deps --target` puts speculators and what is
    listed in NEEDED into a folder, once (.cache/speculators-VERSION). A virtual environment of its own then finds,
    by a .pth file, that folder first, and after it this environment's site-packages for torch and the rest.
    """
    folder = Path(__file__).parents[2] / ".cache" / f"speculators-{version}"
    if not (folder / "speculators").is_dir():
        wanted = [f"speculators=={version}", *NEEDED[version]]
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
            *wanted,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"speculators {version} cannot be fetched: {done.stderr.strip()[-200:]}")
    environment = folder.with_name(f"{folder.name}-env")
    if not environment.is_dir():
        bare_python(environment)
    site = next(environment.glob("lib/python*/site-packages"))
    here = [p for p in sys.path if p.endswith("-packages")]
    (site / "both.pth").write_text("\n".join([str(folder), *here]) + "\n")
    return str(environment / "bin" / "python")


@pytest.fixture
def replay(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def look(version: str, text: str) -> list[dict]:
        write(tmp_path, {"train.py": text})
        subject = Subject(script=tmp_path / "train.py", python=real_python(version), import_limit=120.0)
        return [f for s in run_preflight(subject, ["imports"])["stages"] for f in s["findings"]]

    return look


@pytest.mark.slow
def test_a_script_of_0_3_runs_with_the_real_0_3(replay):
    """See real_python for what is installed and how."""
    found = replay("0.3.0", OLD_SCRIPT)
    assert of(found, "error", "warning") == []


@pytest.mark.slow
def test_a_script_of_0_3_with_the_real_0_9_is_told_what_moved_and_what_to_write(replay):
    """See real_python for what is installed and how."""
    found = replay("0.9.0", OLD_SCRIPT)
    faults = {f["evidence"]["name"]: f for f in of(found, "error")}
    data, model = "speculators.train.data.", "speculators.models.eagle3.core.Eagle3DraftModel"
    lost = {
        data + n for n in ("Eagle3SampleFileDataset", "split_files", "standardize_data_v0", "create_collate_fn")
    }
    assert set(faults) == lost | {model}
    assert "CollateFn(max_len, hidden_size, preprocess=shift_batch)" in faults[data + "create_collate_fn"]["hint"]
    assert "speculators==0.4.0" in faults[data + "Eagle3SampleFileDataset"]["hint"]
    assert "takes 1 positional argument, 3 are given" in faults[model]["message"]
    assert "load_vocab_mappings(t2d, d2t)" in faults[model]["hint"]
    warned = "\n".join(f["message"] for f in of(found, "warning"))
    assert "train.py is written for speculators 0.3.0, 0.9.0 is installed" in warned
    assert "Eagle3DraftModel.forward` needs `document_ids`, no longer takes `lengths`" in warned
    assert "behaves otherwise since speculators 0.6.0: metrics come as pairs" in warned


@pytest.mark.slow
def test_a_script_of_0_9_runs_with_the_real_0_9_and_not_with_0_3(replay):
    """See real_python for what is installed and how."""
    assert of(replay("0.9.0", NEW_SCRIPT), "error", "warning") == []
    faults = [f["message"] for f in of(replay("0.3.0", NEW_SCRIPT), "error")]
    assert any("exposes nothing named `CollateFn`" in text for text in faults)
    assert any("needs `t2d` and `d2t`, which are not given" in text for text in faults)
