"""Time whole optimiser steps (forward, backward, clipping, AdamW) on synthetic features.

    python benchmarks/train_step.py --supervised 0.1 0.25 0.5 1.0

One line of JSON for each share of supervised tokens: tokens/s (all tokens, supervised or not), ms a step, peak
memory, and the share of the matrix products' time in the step, at the rate measured in the same process.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from workload import SMALL, RandomTarget, Sizes, batch, draft

from eyas.config import TrainConfig
from eyas.draft import row_plan
from eyas.draft.rows import RowPlan
from eyas.train.checkpoint import Training
from eyas.train.loop import optimiser_step


def product_flops(s: Sizes, plan: RowPlan, n: int, targets: int, train_lm_head: bool) -> float:
    """Operations of every matrix product of a step, attention left out: forward once, backward as needed."""
    queries, shared = s.heads * s.head_dim, s.kv_heads * s.head_dim
    computed = [len(step.kept) for step in plan.steps]
    counted = int(plan.counts.sum())
    once = 2 * n * s.hidden * 3 * s.hidden * 2  # fc: forward and weight
    once += 2 * n * s.hidden * 2 * shared * 3  # embedding half of k and v
    once += 2 * len(plan.query_tokens) * s.hidden * queries * 3  # and of q
    once += 2 * n * s.hidden * 2 * shared * 3  # step-0 hidden half of k and v
    a_row = s.hidden * queries * 2 + 3 * s.hidden * s.intermediate  # q, o, MLP
    rows = 2 * 3 * (sum(computed) * a_row + sum(computed[1:]) * s.hidden * 2 * shared)
    head = 2 * s.hidden * s.draft_vocab * (counted * (3 if train_lm_head else 2) + targets)
    return float(once + rows + head)


def measured_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """Operations a second of a large square product."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        synchronize()
        started = time.perf_counter()
        a @ b
        synchronize()
        times.append(time.perf_counter() - started)
    return 2 * size**3 / sorted(times)[len(times) // 2]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--supervised", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0], help="shares")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048, help="tokens a document")
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--train-lm-head", action="store_true")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--profile", type=Path, help="write torch.profiler's table of a step to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, stored = SMALL if args.small else Sizes(), torch.bfloat16 if device == "cuda" else torch.float32
    rate = measured_rate(device, stored, 512 if args.small else 8192)
    for share in args.supervised:
        config = TrainConfig(ttt_steps=args.ttt_steps, dtype=args.dtype, lr=1e-4)
        model = draft(sizes, RandomTarget(sizes, device, stored), device, args.train_lm_head)
        training = Training(model.train(), config, 0)
        data = batch(sizes, share, args.documents, args.length, args.ttt_steps, device, stored)
        started = time.perf_counter()
        plan = row_plan(data, args.ttt_steps)
        plan_seconds = time.perf_counter() - started
        ready = data._replace(plan=plan.to(torch.device(device)))
        seconds, losses = [], []
        for step in range(args.steps + 3):
            if step == 3 and device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            started = time.perf_counter()
            losses.append(optimiser_step(training, [ready], 1e-4, [["synthetic"]])["loss"])
            synchronize()
            seconds.append(time.perf_counter() - started)
        middle = sorted(seconds[3:])[args.steps // 2]
        flops = product_flops(sizes, plan, len(data.input_ids), len(data.targets), args.train_lm_head)
        result = {
            "who": "eyas", "supervised": share, "documents": args.documents, "length": args.length,
            "ttt_steps": args.ttt_steps, "train_lm_head": args.train_lm_head, "rows": len(plan.steps[0].kept),
            "tok_s": round(len(data.input_ids) / middle), "step_ms": round(middle * 1e3, 2),
            "first_step_s": round(seconds[0], 2), "plan_ms": round(plan_seconds * 1e3, 1),
            "product_tflop": round(flops / 1e12, 2), "product_rate_tflops": round(rate / 1e12, 1),
            "roofline_share": round(flops / rate / middle, 3), "loss_first": losses[0], "loss_last": losses[-1],
        }  # fmt: skip
        if device == "cuda":
            result["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        print(json.dumps(result), flush=True)
        if args.profile:
            from torch.profiler import ProfilerActivity, profile

            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
            with profile(activities=kinds) as profiled:
                optimiser_step(training, [ready], 1e-4, [["synthetic"]])
                synchronize()
            key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
            table = profiled.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=70)
            args.profile.write_text(table)
        del model, training, data, ready


if __name__ == "__main__":
    main()
