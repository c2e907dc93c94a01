"""Machines and installations with one fault each: false tools on the PATH, false packages, limits really set."""

import os

import pytest

from tests.preflight.workshop import Fault, expect, names, of, write

# A torch that says what real ones say of machines that are not at hand.
TORCH = """
__version__, float32, bfloat16 = "2.11.0+cu128", "float32", "bfloat16"
class version: cuda, hip = "12.8", None
class _C: _cuda_getDriverVersion = staticmethod(lambda: 12020)
class Product(float):
    __matmul__ = lambda self, other: Product(self * other * 256)
    float = sum = lambda self: self
def ones(*shape, dtype, device):
    if device in cuda.broken: raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    return Product(256)
class cuda:
    broken, capability = [], (9, 0)
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 2)
    get_arch_list = staticmethod(lambda: ["sm_80", "sm_90"])
    get_device_name = staticmethod(lambda d: "NVIDIA H200")
    get_device_capability = staticmethod(lambda d: cuda.capability)
    mem_get_info = staticmethod(lambda d: (140 * 10**9, 141 * 10**9))
"""
META = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
GPUS = {"torch/__init__.py": TORCH, "torch-2.11.0+cu128.dist-info/METADATA": META.format("torch", "2.11.0+cu128")}
GPUS |= {"torch-2.11.0+cu128.dist-info/top_level.txt": "torch\n"}

SMI = """#!/bin/sh
case "$*" in
-L) echo "GPU 0: NVIDIA H200 (UUID: GPU-a)"; echo "GPU 1: NVIDIA H200 (UUID: GPU-b)";;
"-i 0"*) echo "0, GPU-a, NVIDIA H200, 570.10, 143771, 0";;
"-i 1"*) echo "1, GPU-b, NVIDIA H200, 570.10, 143771, 0";;
esac
"""


def torch_with(change: str) -> dict[str, str]:
    return GPUS | {"torch/__init__.py": TORCH + change + "\n"}


def dist(name: str, version: str, requires: str = "", module: bool = True) -> dict[str, str]:
    top = name.replace("-", "_")
    files = {f"{top}-{version}.dist-info/METADATA": META.format(name, version) + requires}
    files[f"{top}-{version}.dist-info/top_level.txt"] = f"{top}\n"
    return files | ({f"{top}/__init__.py": ""} if module else {})


BUSY = SMI.replace("143771, 0", "143771, 129000", 1)
HELD = BUSY + 'case "$1" in --query-compute*) echo "GPU-a, PID, 128990";; esac\n'
LOST = SMI.replace(
    "1, GPU-b, NVIDIA H200, 570.10, 143771, 0", "Unable to determine the device handle: Unknown Error"
)

# Torch as PyPI has it: the CUDA it is built for is in version.py alone.
PLAIN = {"torch-2.11.0+cu128.dist-info/METADATA": META.format("torch", "2.11.0")}
PLAIN |= {"torch/version.py": "__version__ = '2.11.0'\ncuda: Optional[str] = '12.8'\n"}

FAULTS = [
    Fault("torch not installed", "torch", "torch is not installed for", "-m pip install torch"),
    Fault("torch does not import", "torch", "torch does not import: OSError: libcudart.so.12", "reinstall torch",
          files=GPUS | {"torch/__init__.py": "raise OSError('libcudart.so.12: cannot open')\n"}),
    Fault("driver too old", "torch", "cannot use the 2 GPUs: driver 570.10, which knows CUDA up to 12.2",
          "update the driver", files=torch_with("cuda.is_available = lambda: False")),
    Fault("torch without CUDA", "torch",
          "is built without CUDA, and 2 GPUs are here (NVIDIA H200, driver 570.10)", "install a CUDA build",
          level="warning",
          files=torch_with("version.cuda = None; cuda.is_available = lambda: False; __version__ = '2.11.0+cpu'")),
    Fault("one GPU of two is broken", "devices",
          "cuda:1 NVIDIA H200 cannot multiply matrices: RuntimeError: CUDA error: unc", "CUDA_VISIBLE_DEVICES",
          files=torch_with("cuda.broken = ['cuda:1']")),
    Fault("wrong product", "devices", "cpu cannot multiply matrices: a product of ones in float32 is wrong",
          "does not fit this CPU",
          files=torch_with("ok = ones\ndef ones(*a, dtype, device): return Product(256 - (device == 'cpu'))")),
    Fault("no kernels for this GPU", "devices",
          "cuda:0 NVIDIA H200 has capability 7.0, torch 2.11.0+cu128 has kernels for sm_80",
          "a torch build for this GPU",
          files=torch_with("cuda.device_count = lambda: 1; cuda.capability = (7, 0)")),
    Fault("extension for another CUDA", "extensions",
          "fused 1.2+cu124 is built for CUDA 124, torch 2.11.0+cu128 is CUDA 128",
          "install the fused built for torch 2.11.0+cu128", files=GPUS | dist("fused", "1.2+cu124")),
    Fault("extension for another torch", "extensions",
          "flash-attn 2.8.3+cu12torch2.8 is built for torch 2.8, torch 2.11", "built for torch 2.11.0+cu128",
          files=GPUS | dist("flash-attn", "2.8.3+cu12torch2.8")),
    Fault("extension without CUDA", "extensions", "torchvision 0.26+cpu is built for CUDA cpu",
          "install the torchvision built", files=GPUS | dist("torchvision", "0.26+cpu")),
    Fault("extension for another CUDA than torch from PyPI", "extensions",
          "fused 1.2+cu124 is built for CUDA 124, torch 2.11.0 is CUDA 128", "install the fused built for",
          files=GPUS | dist("fused", "1.2+cu124") | PLAIN),
    Fault("pinned to another torch", "versions", "torch 2.11.0+cu128 is installed, fused 1.2 needs ==2.9.1",
          "pip install 'torch==2.9.1'", files=GPUS | dist("fused", "1.2", "Requires-Dist: torch==2.9.1\n")),
    Fault("need not met", "versions", "lib 2.0 is installed, kit 1.0 needs <2", "pip install 'lib<2'",
          level="warning", files=GPUS | dist("lib", "2.0") | dist("kit", "1.0", "Requires-Dist: lib<2\n")),
    Fault("need not there", "versions", "kit 1.0 needs lib>=1, which is not installed", "pip install 'lib>=1'",
          files=GPUS | dist("kit", "1.0", "Requires-Dist: lib>=1\nRequires-Dist: other; extra == 'more'\n")),
    Fault("package for another Python", "python", "kit 1.0 needs Python >=4", "run with a Python >=4",
          files=GPUS | dist("kit", "1.0", "Requires-Python: >=4\n")),
    Fault("listed, not there", "installs", "broken install: kit 1.0 is listed, but its module `kat` is not there",
          "--force-reinstall kit", "import kit, kat\n", GPUS | {"kit-1.0.dist-info/top_level.txt": "kit\nkat\n"}),
    Fault("compiled package that is a stub", "operations",
          "numpy 2.4 is installed and does not work: ImportError: stub", "--force-reinstall numpy",
          files=GPUS | dist("numpy", "2.4") | {"numpy/__init__.py": "raise ImportError('stub')\n"}),
]  # fmt: skip


@pytest.fixture
def machine(work, monkeypatch):
    """machine(smi): two healthy GPUs, or what the given nvidia-smi says."""
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def make(smi: str = SMI) -> None:
        tool = work.folder / "bin" / "nvidia-smi"
        write(work.folder, {"bin/nvidia-smi": smi})
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")

    make()
    return make


@names(FAULTS)
def test_each_fault_is_found_and_its_cure_named(fault, work, machine):
    write(work.site, fault.files)
    expect(work.check(fault.script, ("environment",)), fault)


def test_a_healthy_machine_passes(work, machine):
    write(work.site, GPUS)
    found = work.check("import kit\n", ("environment",))
    assert of(found, "error", "warning") == []
    said = "\n".join(f["message"] for f in found)
    assert "torch 2.11.0+cu128 (CUDA 12.8) uses 2 GPUs, driver 570.10" in said
    assert "cuda:1 NVIDIA H200 multiplies matrices" in said
    assert "GPU 0 NVIDIA H200: 140.4 of 140.4 GiB free" in said


def test_extensions_that_fit_torch_from_pypi_pass(work, machine):
    write(work.site, GPUS | PLAIN | dist("fused", "1.2+cu128") | dist("flash-attn", "2.8.3+cu12torch2.11"))
    assert of(work.check("import kit\n", ("environment",)), "error", "warning") == []


def test_memory_held_by_another_process_names_it(work, machine):
    write(work.site, GPUS)
    machine(HELD.replace("PID", str(os.getpid())))
    (found,) = of(work.check("import kit\n", ("environment",)), "warning", "error")
    assert found["check"] == "gpu_memory" and "GPU 0 NVIDIA H200: 14.4 of 140.4 GiB free" in found["message"]
    assert f"pid {os.getpid()} " in found["message"] and "(128990 MiB)" in found["message"]
    assert "CUDA_VISIBLE_DEVICES" in found["hint"]


def test_memory_held_by_processes_of_another_container(work, machine):
    write(work.site, GPUS)
    machine(BUSY)
    (found,) = of(work.check("import kit\n", ("environment",)), "warning", "error")
    assert "held by processes that cannot be seen from here" in found["message"]


def test_a_gpu_that_does_not_answer_does_not_hide_the_other(work, machine):
    write(work.site, GPUS)
    machine(LOST)
    found = [f for f in work.check("import kit\n", ("environment",)) if f["check"] == "gpu_memory"]
    assert [f["level"] for f in found] == ["warning", "info"]
    assert "GPU 1: Unable to determine the device handle" in found[0]["message"]
    assert "GPU 0 NVIDIA H200" in found[1]["message"]


ASKED = [
    ({"CUDA_VISIBLE_DEVICES": "0,7"}, "error", "=0,7 names GPU 7, and there are 2", "among 0 to 1"),
    ({"CUDA_VISIBLE_DEVICES": "1,1"}, "error", "CUDA_VISIBLE_DEVICES=1,1 names one GPU twice", "each once"),
    ({"CUDA_VISIBLE_DEVICES": ""}, "warning", "CUDA_VISIBLE_DEVICES='' hides all 2 GPUs", "unset it"),
    ({"LOCAL_WORLD_SIZE": "8"}, "error", "torchrun starts 8 processes", "--nproc-per-node 2"),
]


@pytest.mark.parametrize(("variables", "level", "message", "cure"), ASKED)
def test_gpus_asked_for_and_not_there(work, machine, monkeypatch, variables, level, message, cure):
    write(work.site, GPUS)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (found,) = [f for f in of(work.check("import kit\n", ("environment",)), level) if f["check"] == "gpus_asked"]
    assert message in found["message"] and cure in found["hint"]


REMAINS = {"wandb/__init__.py": "has no version metadata", "wandb/x.pyc": "is an empty remainder of a package"}


@pytest.mark.parametrize(("file", "what"), REMAINS.items())
def test_a_module_folder_without_metadata_is_a_broken_install(tmp_path, file, what):
    """In a real environment of its own: only what lies in site-packages can be broken like that."""
    from tests.preflight.workshop import Workshop, bare_python

    made = Workshop(tmp_path, bare_python(tmp_path / "env"))
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    write(site, {file: ""})
    (found,) = [f for f in of(made.check("import os\n", ("environment",)), "warning") if f["check"] == "installs"]
    assert found["message"] == f"broken install: {site / 'wandb'} {what}"
    assert "--force-reinstall wandb" in found["hint"] and "remove that folder" in found["hint"]
    (found,) = [f for f in of(made.check("import wandb\n", ("environment",)), "error") if f["check"] == "installs"]
    assert what in found["message"]  # it is an error where the script needs it
