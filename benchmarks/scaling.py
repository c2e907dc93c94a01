"""Time per token against the length of the context, and what differing batches make the compiler do.

    python benchmarks/scaling.py

As many tokens a step at every length (one document of 32k or sixteen of 2k), half of them supervised. Then 200
steps of differing documents, after which no kernel may have been compiled anew.
"""

import argparse
import json
import time

import torch
from workload import SMALL, RandomTarget, Sizes, batch, draft

from eyas.config import TrainConfig
from eyas.draft import row_plan
from eyas.train.checkpoint import Training
from eyas.train.loop import optimiser_step


def variants() -> int:
    """Compiled forms of all of eyas's kernels so far."""
    from eyas.kernels import elementwise_gpu, linear_kl_gpu, ttt_attention_gpu

    found = 0
    for module in (elementwise_gpu, linear_kl_gpu, ttt_attention_gpu):
        for kernel in vars(module).values():
            for caches in getattr(kernel, "device_caches", {}).values():
                found += len(caches[0])
    return found


def step(training: Training, sizes: Sizes, documents: int, length: int, share: float, repeat: int) -> float:
    """Median seconds of `repeat` steps over one batch."""
    device = training.device
    stored = torch.bfloat16 if device.type == "cuda" else torch.float32
    data = batch(sizes, share, documents, length, 7, str(device), stored)
    data = data._replace(plan=row_plan(data, 7).to(device))
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        optimiser_step(training, [data], 1e-4, [["synthetic"]])  # ends by reading the loss: all work is done
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[repeat // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a step")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--supervised", type=float, default=0.5)
    parser.add_argument("--batches", type=int, default=200, help="steps of differing documents")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, stored = SMALL if args.small else Sizes(), torch.bfloat16 if device == "cuda" else torch.float32
    model = draft(sizes, RandomTarget(sizes, device, stored), device, False)
    training = Training(model.train(), TrainConfig(), 0)
    first = None
    for length in args.lengths:
        seconds = step(training, sizes, args.tokens // length, length, args.supervised, 5)
        first = first or seconds
        line = {"length": length, "documents": args.tokens // length, "step_ms": round(seconds * 1e3, 2)}
        print(
            json.dumps(line | {"tok_s": round(args.tokens / seconds), "against_first": round(seconds / first, 3)})
        )
    if device == "cuda":
        lengths = torch.randint(64, 2048, (args.batches,), generator=torch.Generator().manual_seed(3)).tolist()
        shares = torch.rand(args.batches, generator=torch.Generator().manual_seed(4)).clamp(0.05, 0.95).tolist()
        known = []
        for i, (length, share) in enumerate(zip(lengths, shares, strict=True)):
            known.append(variants())
            step(training, sizes, 1 + i % 4, length, share, 1)
        print(
            json.dumps(
                {"batches": args.batches, "kernels": variants(), "compiled_after_20": variants() - known[20]}
            )
        )


if __name__ == "__main__":
    main()
