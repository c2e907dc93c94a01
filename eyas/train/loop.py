"""The training loop: top to bottom, one optimiser step after the other.

Losses are means over the counted rows of the whole optimiser step: how many there are follows from the masks,
before the first forward pass, so the losses and gradients of its micro-batches simply add up. Weights and AdamW's
moments are float32; with bfloat16 only the matrix products are, over copies cast in every forward pass.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from eyas.config import TrainConfig
from eyas.draft import Eagle3DraftModel, TrainBatch, TTTOutput, row_plan
from eyas.errors import EyasError
from eyas.features.store import Store
from eyas.progress import bar, say, warn
from eyas.train import checkpoint, distributed
from eyas.train.batches import StepPlan, pack, plan_epoch, plan_steps, prefetch
from eyas.train.checkpoint import Training
from eyas.train.metrics import Metrics
from eyas.train.optim import learning_rate, update
from eyas.train.replay import Replay, replay


def fit(
    model: Eagle3DraftModel,
    data: Store,
    heldout: Store,
    config: TrainConfig,
    out: Path,
    seed: int = 0,
    provenance: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train `model` (initialised, on its device) and leave the best `model.safetensors` and `draft.json` in `out`.

    Goes on from the newest whole checkpoint in `out`/checkpoints and ends with the same bytes as without a break.
    Best is the highest replayed τ on `heldout` (ties: the lower loss); without held-out samples, the last step.
    Returns the stage's result. Raises EyasError for lack of data or disk, or a loss or gradient not finite.
    """
    plan, warnings = plan_run(data, heldout, config, seed)
    training, first = Training(model.train(), config, seed), distributed.rank() == 0
    root = out / "checkpoints"
    if first:  # it alone removes broken checkpoints, and writes
        checkpoint.resume(root, training)
        checkpoint.check_disk(root, training)
    distributed.tell()
    if not first:
        checkpoint.resume(root, training)
    size = sum(p.numel() for p in training.trained().values())
    say(f"draft of 1 layer, {size:,} trained parameters; loss KL(target || draft), {config.ttt_steps} TTT steps")
    ranks = f", {distributed.size()} processes" if distributed.size() > 1 else ""
    say(f"{len(plan)} optimiser steps, {products(training)} products on {training.device}{ranks}")
    metrics = Metrics(out / "logs", training.step) if first else None
    todo = plan[training.step :]
    tokens, spent, clock = sum(step.tokens for step in todo), 0.0, time.perf_counter()
    batches_of = partial(load_step, data, config)
    with bar("train", tokens, "tok") as shown, stop_signal() as stopped:
        for step, batches, waited in prefetch(batches_of, todo, training.device):
            names = [[data.ids[i] for i in indices] for indices in own(step.batches)]
            row = optimiser_step(training, batches, learning_rate(training.step, len(plan), config), names)
            training.counts["tokens"] += step.tokens
            seconds = time.perf_counter() - clock  # waiting for data included
            spent += seconds
            rates = {"tokens_per_second": step.tokens / seconds, "wait_share": waited / seconds}
            row |= {"epoch": step.epoch, **rates}
            if metrics:
                metrics.write(training.step, "train", row)
            shown.update(step.tokens, f"loss {row['loss']:.3f}")

            last = training.step == len(plan)
            if len(heldout) and (last or is_due(config.eval_every, training.step, step)):
                row = evaluate(training, heldout)
                if metrics:
                    metrics.write(training.step, "eval", row)
                training.judge(row)
                tau = "no rounds" if row["tau"] is None else f"replayed τ {row['tau']:.3f}"
                say(f"step {training.step}: held-out loss {row['loss']:.4f}, {tau}")
            stop = bool(distributed.total(torch.tensor(int(stopped()))))
            due = last or stop or training.best == training.step
            if first and (due or is_due(config.checkpoint_every, training.step, step)):
                checkpoint.save(root, training, provenance or {})
            if stop and not last:
                raise EyasError(
                    f"stopped by SIGTERM after step {training.step}, which is kept", "run it again to go on"
                )
            clock = time.perf_counter()
    if metrics:
        metrics.close()
        checkpoint.publish(root, training.best or training.step, out)
    best = next((e for e in training.evals if e["step"] == training.best), {})
    return {
        "counts": {"steps": training.step, **training.counts, "samples": len(data), "heldout": len(heldout)},
        "best_step": training.best,
        **{k: best.get(k) for k in ("tau", "accept_rate_by_position", "loss")},
        "evals": training.evals,
        "tokens_per_second": tokens / spent if spent else None,
        "warnings": warnings,
    }


@contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """A function that says whether SIGTERM has come; inside, the signal stops nothing by itself."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)


def own(batches: Sequence[Any]) -> Sequence[Any]:
    """This rank's share of an optimiser step's micro-batches, or of the held-out ones."""
    return batches[distributed.rank() :: distributed.size()]


def plan_run(data: Store, heldout: Store, config: TrainConfig, seed: int) -> tuple[list[StepPlan], list[str]]:
    """The optimiser steps of the run, and what its user should know about them."""
    if not data.supervised_counts.sum():
        found = "no supervised token" if len(data) else "no training samples"
        raise EyasError(f"{data.folder} holds {found}", "see what `prepare` has counted and set aside")
    budget, warnings, ranks = config.batch_tokens, [], distributed.size()
    if config.accumulation < ranks:
        found = f"{ranks} processes share {config.accumulation} micro-batches of an optimiser step"
        raise EyasError(found, f"set train.accumulation to a multiple of {ranks}")
    if config.accumulation % ranks:
        warnings.append(f"train.accumulation {config.accumulation} is no multiple of {ranks} processes: some idle")
    arguments = data.lengths, budget, config.accumulation, seed, config.epochs
    plan = plan_steps(*arguments, config.max_steps)
    if config.max_steps and (whole := len(plan_steps(*arguments))) != config.max_steps:
        text = f"max_steps is {config.max_steps}; train.epochs {config.epochs} would be {whole} optimiser steps"
        warnings.append(text)
    if cut := int((data.lengths > budget).sum()):
        warnings.append(f"{cut} of {len(data)} samples are longer than train.batch_tokens {budget}: cut there")
    if not len(heldout):
        warnings.append("no held-out samples to tell the best step by: the last is kept (see data.heldout)")
    for text in warnings:
        warn(text)
    return plan, warnings


def load(data: Store, config: TrainConfig, indices: Iterable[int]) -> TrainBatch:
    batch = pack((data[i] for i in indices), config.batch_tokens)
    return batch._replace(plan=row_plan(batch, config.ttt_steps))


def load_step(data: Store, config: TrainConfig, step: StepPlan) -> list[TrainBatch]:
    return [load(data, config, indices) for indices in own(step.batches)]


def is_due(every: int | None, done: int, step: StepPlan) -> bool:
    return done % every == 0 if every else step.ends_epoch


def optimiser_step(
    training: Training, batches: list[TrainBatch], lr: float, ids: list[list[str]]
) -> dict[str, Any]:
    """Forward and backward over the micro-batches (on the device, with their plans), clip, update.

    Returns the step's metrics as plain numbers. Raises EyasError naming the samples (`ids` of each micro-batch)
    when a loss or the gradient is not finite.
    """
    config, plans = training.config, [b.plan or row_plan(b, training.config.ttt_steps) for b in batches]
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    none = torch.zeros(config.ttt_steps, dtype=torch.int64)
    totals = distributed.total(sum((plan.counts for plan in plans), none))  # [K]
    losses, sums = [], torch.zeros(4, config.ttt_steps, device=training.device)
    for i, batch in enumerate(batches):
        output = forward(training, add_noise(training, batch, distributed.rank() + i * distributed.size()), totals)
        output.loss.backward()
        losses.append(output.loss.detach())
        sums += step_sums(output)
    distributed.total_gradients(list(training.trained().values()))
    loss = distributed.total(torch.stack([sums.new_zeros(()), *losses]).sum())
    norm = update(training.optimizer, config.grad_clip, loss)
    norm, loss, *losses = torch.stack([norm, loss, *losses]).tolist()  # the one place that waits for the device
    checked = [("loss", *pair) for pair in zip(losses, ids, strict=True)]
    everyone = list(chain(*ids))
    for what, value, names in [*checked, ("loss", loss, everyone), ("gradient norm", norm, everyone)]:
        if not math.isfinite(value):
            hint = "try a lower train.lr, or train.dtype float32; the checkpoints before this step are kept"
            raise EyasError(f"step {training.step + 1}: the {what} is {value}; samples: {', '.join(names)}", hint)
    training.step += 1
    rows = [(len(b.targets), len(p.steps[0].kept), len(b.input_ids)) for b, p in zip(batches, plans, strict=True)]
    counts = distributed.total(torch.tensor([(0, 0, 0), *rows]).sum(0)).tolist()
    for name, count in zip(("supervised", "rows_computed", "rows_total"), counts, strict=True):
        training.counts[name] += count
    return {"loss": loss, "lr": lr, "grad_norm": norm, **step_means(distributed.total(sums))}


def add_noise(training: Training, batch: TrainBatch, number: int) -> TrainBatch:
    """Gaussian noise on the aux states, relative to each state's RMS, drawn by seed, step and micro-batch."""
    if not training.config.noise:
        return batch
    seed = np.random.SeedSequence([training.seed, training.step, number]).generate_state(1, np.uint64)[0]
    generator = torch.Generator(training.device).manual_seed(int(seed >> 1))
    aux = batch.aux.float().unflatten(1, (training.model.config.num_aux, -1))  # [N, A, H]
    draw = torch.randn(aux.shape, generator=generator, device=aux.device)
    rms = aux.pow(2).mean(-1, keepdim=True).sqrt()  # [N, A, 1]
    return batch._replace(aux=torch.addcmul(aux, draw, rms, value=training.config.noise).flatten(1))


def products(training: Training) -> str:
    """Precision of the matrix products."""
    auto = "bfloat16" if training.device.type == "cuda" else "float32"
    return auto if training.config.dtype == "auto" else training.config.dtype


def forward(training: Training, batch: TrainBatch, totals: Tensor | None = None) -> TTTOutput:
    """The model's forward pass; gradients reach the float32 weights whatever the precision of its products."""
    arguments = {"batch": batch, "ttt_steps": training.config.ttt_steps, "totals": totals}
    arguments["ttt_step_loss_decay"] = training.config.ttt_decay
    if products(training) == "float32":
        return training.model(**arguments)
    copies = {name: p.to(torch.bfloat16) for name, p in training.model.named_parameters()}
    return functional_call(training.model, copies, kwargs=arguments)


def step_sums(output: TTTOutput) -> Tensor:
    """[4, K]: KL, arg-max hits and overlap, each summed over the rows counted at TTT step k; and their number."""
    return torch.stack([x.float() for x in (output.kl, output.hits, output.overlap, output.counts)])


def step_means(sums: Tensor) -> dict[str, list[float]]:
    """Means of `step_sums`. `overlap_by_step`: of sum_v min(target, draft), the acceptance of sampled drafts;
    `target_accuracy_by_step`: share of rows whose arg-max is the target's over the draft vocabulary."""
    kl, hits, overlap = (sums[:3] / sums[3].clamp(min=1)).tolist()
    return {"loss_by_step": kl, "target_accuracy_by_step": hits, "overlap_by_step": overlap}


@torch.no_grad()
def evaluate(training: Training, heldout: Store) -> dict[str, Any]:
    """Loss and replayed acceptance (`Replay.summary`) over all held-out samples: ratios of sums."""
    config = training.config
    sums, walked = torch.zeros(4, config.ttt_steps, dtype=torch.float64), Replay.none(config.ttt_steps)
    training.model.eval()
    plan = plan_epoch(heldout.lengths, config.batch_tokens, seed=0, epoch=0)
    for _, (batch,), _ in prefetch(lambda indices: [load(heldout, config, indices)], own(plan), training.device):
        output = forward(training, batch)
        sums += step_sums(output).cpu()
        rows = (output.draft_tokens, batch.input_ids, batch.supervised, batch.doc_end)
        walked += replay(*(x.cpu().numpy() for x in rows))
    training.model.train()
    means = step_means(distributed.total(sums))
    walked = Replay.from_numbers(distributed.total(torch.from_numpy(walked.numbers())).numpy())
    weights = [config.ttt_decay**k for k in range(config.ttt_steps)]
    loss = sum(w * x for w, x in zip(weights, means["loss_by_step"], strict=True)) / sum(weights)
    return {"loss": loss, **means, **walked.summary()}
