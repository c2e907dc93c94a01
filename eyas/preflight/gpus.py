"""Environment, its GPUs: does torch fit the driver, does every device compute, who holds their memory, and are as
many visible as the launcher asks for? nvidia-smi is asked, and torch in a process of its own.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.preflight.child import Reply, ask
from eyas.preflight.finding import Check, Finding, Subject, error, info, once, warning
from eyas.preflight.packages import environment

TAKEN = 0.1  # share of a GPU's memory that others may hold without a warning
FIELDS = "index,uuid,name,driver_version,memory.total,memory.used"


@dataclass(frozen=True)
class Gpu:
    """What the driver says of one GPU; sizes in MiB."""

    index: str
    uuid: str
    name: str
    driver: str
    total: float
    used: float


def smi(*arguments: str) -> list[str]:
    """Lines of nvidia-smi, errors too; none when there is no nvidia-smi or it does not answer."""
    if not (program := shutil.which("nvidia-smi")):
        return []
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as e:
        return [f"nvidia-smi: {e}"]
    return [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]


@once
def driver_view(s: Subject) -> tuple[list[Gpu], list[str]]:
    """The GPUs that answer, and what was said of those that do not. Each is asked alone, so that one that is lost
    does not hide the others."""
    found, faults = [], []
    for line in smi("-L"):
        listed = re.match(r"GPU (\d+):", line)
        if listed is None:
            faults.append(line)
            continue
        rows = smi("-i", listed[1], f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
        try:
            index, uuid, name, driver, total, used = (part.strip() for part in rows[0].split(","))
            found.append(Gpu(index, uuid, name, driver, float(total), float(used)))
        except (ValueError, IndexError):
            faults.append(f"GPU {listed[1]}: {rows[0] if rows else 'no answer'}")
    return found, faults


@once
def torch_view(s: Subject) -> Reply:
    return ask(s.python, "torch", s.import_limit)


def torch_fits_the_driver(s: Subject) -> Iterator[Finding]:
    gpus, _ = driver_view(s)
    reply, env = torch_view(s), environment(s)
    if reply.result is None:
        absent = env.dist("torch") is None
        text = f"torch is not installed for {s.python}" if absent else f"torch does not import: {reply.fault}"
        hint = (
            f"`{env.executable} -m pip install torch`" if absent else f"reinstall torch {env.version_of('torch')}"
        )
        yield error(text, hint, {"stderr": reply.stderr[-1000:]})
        return
    torch = reply.result
    driver = gpus[0].driver if gpus else "none"
    knows = torch.get("driver") or 0  # 12020 is CUDA 12.2
    build = f"torch {torch['version']} (CUDA {torch['cuda'] or 'none'})"
    evidence = {key: torch[key] for key in ("version", "cuda", "available", "count", "archs")} | {"driver": driver}
    evidence["driver_cuda"] = f"{knows // 1000}.{knows % 1000 // 10}" if knows else None
    if torch["available"]:
        yield info(f"{build} uses {torch['count']} GPUs, driver {driver}", evidence=evidence)
    elif gpus and not torch["cuda"] and not torch["hip"]:
        text = f"{build} is built without CUDA, and {len(gpus)} GPUs are here ({gpus[0].name}, driver {driver})"
        yield warning(text, "install a CUDA build of torch: pytorch.org lists one for each driver", evidence)
    elif gpus and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        said = next((line for line in reply.stderr.splitlines() if "CUDA" in line), "")
        upto = f", which knows CUDA up to {evidence['driver_cuda']}" if knows else ""
        text = f"{build} cannot use the {len(gpus)} GPUs: driver {driver}{upto} {said.strip()}".rstrip()
        yield error(text, "update the driver, or install a torch built for the CUDA it knows", evidence)
    else:
        yield info(f"{build}, no GPU: everything runs on the CPU", evidence=evidence)
    if not torch["available"] and s.given_config and s.given_config.device == "cuda":
        yield error(
            "device: cuda is asked for, and torch sees no GPU", "use --device cpu or auto, or mend the above"
        )


def every_device_computes(s: Subject) -> Iterator[Finding]:
    torch = torch_view(s).result
    assert torch is not None
    ready = [a for a in torch["archs"] if a.startswith(("sm_", "compute_"))]
    built = sorted({int(re.sub(r"\D", "", a)) for a in ready})
    for device, found in torch["devices"].items():
        capability = found.get("capability")
        name = f"{device} {found.get('name', '')}".strip()
        if capability:
            number = capability[0] * 10 + capability[1]
            same_major = [a for a in built if a // 10 == capability[0] and a <= number]
            compiles = any(a.startswith("compute_") and int(re.sub(r"\D", "", a)) <= number for a in ready)
            if built and not same_major and not compiles:
                text = f"{name} has capability {capability[0]}.{capability[1]}, torch {torch['version']}"
                text += f" has kernels for {', '.join(torch['archs'])}"
                yield error(text, "install a torch build for this GPU", {"capability": capability, "archs": ready})
        if fault := found.get("fault"):
            hint = "look at `nvidia-smi -q` for this device; the others can be chosen by CUDA_VISIBLE_DEVICES"
            hint = hint if capability else f"reinstall torch {torch['version']}: this build does not fit this CPU"
            yield error(f"{name} cannot multiply matrices: {fault}", hint, found)
        else:
            yield info(
                f"{name} multiplies matrices in float32 and bfloat16 ({found['seconds']:.2f} s)", evidence=found
            )


def gpu_memory_is_free(s: Subject) -> Iterator[Finding]:
    gpus, faults = driver_view(s)
    for fault in faults:
        yield warning(f"nvidia-smi: {fault}", "leave this GPU out by CUDA_VISIBLE_DEVICES, or reset it")
    holders: dict[str, list[dict[str, str]]] = {}
    for row in (
        smi("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits") if gpus else ()
    ):
        parts = [part.strip() for part in row.split(",")]
        if len(parts) == 3 and parts[1].isdigit():
            holder = {"pid": parts[1], "mib": parts[2], "command": command_of(parts[1])}
            holders.setdefault(parts[0], []).append(holder)
    for gpu in gpus:
        by = holders.get(gpu.uuid, [])
        text = (
            f"GPU {gpu.index} {gpu.name}: {(gpu.total - gpu.used) / 1024:.1f} of {gpu.total / 1024:.1f} GiB free"
        )
        evidence = {"total_mib": gpu.total, "used_mib": gpu.used, "holders": by}
        if gpu.used < TAKEN * gpu.total:
            yield info(text, evidence=evidence)
            continue
        who = ", ".join(f"pid {h['pid']} {h['command']} ({h['mib']} MiB)" for h in by)
        hint = "end what is yours and no longer needed, or choose other GPUs by CUDA_VISIBLE_DEVICES"
        yield warning(f"{text}; held by {who or 'processes that cannot be seen from here'}", hint, evidence)
    if not gpus and not faults:
        yield info("nvidia-smi shows no GPU")


def command_of(pid: str) -> str:
    """The start of a process's command line, if it can be seen from here."""
    file = Path("/proc", pid, "cmdline")
    return file.read_text().replace("\0", " ").strip()[:80] if file.is_file() else ""


def as_many_gpus_as_asked(s: Subject) -> Iterator[Finding]:
    gpus, _ = driver_view(s)
    torch = torch_view(s).result
    assert torch is not None
    seen, chosen = torch["count"] if torch["available"] else 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = [part.strip() for part in (chosen or "").split(",") if part.strip()]
    evidence = {"CUDA_VISIBLE_DEVICES": chosen, "torch": seen, "driver": len(gpus)}
    if chosen is not None and gpus and torch["cuda"]:
        unknown = [x for x in listed if x.isdigit() and int(x) >= len(gpus)]
        if unknown or len(set(listed)) < len(listed):
            wrong = f"GPU {unknown[0]}, and there are {len(gpus)}" if unknown else "one GPU twice"
            text = f"CUDA_VISIBLE_DEVICES={chosen} names {wrong}: CUDA ignores that and all after it"
            yield error(f"{text}; {seen} are visible", f"choose among 0 to {len(gpus) - 1}, each once", evidence)
        elif not listed or listed == ["-1"]:
            yield warning(
                f"CUDA_VISIBLE_DEVICES={chosen!r} hides all {len(gpus)} GPUs", "unset it to use them", evidence
            )
    workers = os.environ.get("LOCAL_WORLD_SIZE", "")
    if workers.isdigit() and seen and int(workers) > seen:
        text = f"torchrun starts {workers} processes on this machine, {seen} GPUs are visible"
        yield error(
            text, f"use --nproc-per-node {seen}, or make more GPUs visible", evidence | {"workers": workers}
        )
    if gpus and seen and seen < len(gpus):
        yield info(f"{seen} of {len(gpus)} GPUs are visible", evidence=evidence)


CHECKS = [
    Check("torch", "environment", ("python",), torch_fits_the_driver, "machine"),
    Check("devices", "environment", ("torch",), every_device_computes, "machine"),
    Check("gpu_memory", "environment", (), gpu_memory_is_free, "machine"),
    Check("gpus_asked", "environment", ("torch",), as_many_gpus_as_asked, "machine"),
]
