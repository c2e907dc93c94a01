"""What torch says of this machine's devices, and one true product on each. Part of `_probe.py`."""

import contextlib
import time


def devices(job):
    """The torch that is installed, and one true product on every device."""
    import torch

    told = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
    told.update(
        available=torch.cuda.is_available(), count=torch.cuda.device_count(), archs=torch.cuda.get_arch_list()
    )
    with contextlib.suppress(Exception):  # no public name says it
        told["driver"] = getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009
    names = ["cpu"] + [f"cuda:{i}" for i in range(told["count"] if told["available"] else 0)]
    told["devices"] = {name: product(torch, name) for name in names}
    return told


def product(torch, device):
    found, start = {}, time.perf_counter()
    try:
        if device != "cpu":
            found["name"], found["capability"] = (
                torch.cuda.get_device_name(device),
                torch.cuda.get_device_capability(device),
            )
            found["free"], found["total"] = torch.cuda.mem_get_info(device)
        for kind in (torch.float32, torch.bfloat16):
            x = torch.ones(256, 256, dtype=kind, device=device)
            if float((x @ x).float().sum()) != 256**3:
                found.setdefault("fault", f"a product of ones in {kind} is wrong")
    except Exception as e:
        found["fault"] = f"{type(e).__name__}: {e}"
    return dict(found, seconds=time.perf_counter() - start)
