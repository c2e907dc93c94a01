"""The training loop: top to bottom, one optimiser step after the other.

Losses are means over the counted rows of the whole optimiser step: how many there are follows from the masks,
before the first forward pass, so the losses and gradients of its micro-batches simply add up. Weights and AdamW's
moments are float32; with bfloat16 only the matrix products are, over copies cast in every forward pass.
"""

import math
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from eyas.config import TrainConfig
from eyas.draft import Eagle3DraftModel, TrainBatch, TTTOutput, counted_rows
from eyas.errors import EyasError
from eyas.features.store import Store
from eyas.progress import bar, say, warn
from eyas.train import checkpoint
from eyas.train.batches import StepPlan, pack, plan_epoch, plan_steps, prefetch
from eyas.train.checkpoint import Training
from eyas.train.metrics import Metrics
from eyas.train.optim import adamw, clip_gradients, learning_rate
from eyas.train.replay import replay


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
    Returns the stage's result. Raises EyasError for missing data, too little disk, or a loss or gradient that is
    not finite.
    """
    plan, warnings = plan_run(data, heldout, config, seed)
    noise = torch.Generator(model.fc.weight.device).manual_seed(seed)
    training = Training(model.train(), adamw(model, config), noise, config, seed)
    root = out / "checkpoints"
    checkpoint.resume(root, training)
    checkpoint.check_disk(root, training)
    say(
        f"draft of 1 layer, {sum(p.numel() for p in training.trained().values()):,} trained parameters; loss "
        f"KL(target || draft) over {config.ttt_steps} TTT steps; {len(plan)} optimiser steps, "
        f"{products(training)} products on {noise.device}"
    )
    try_largest(training, data, plan)
    metrics = Metrics(out / "logs", training.step)
    sizes = np.minimum(data.lengths, config.batch_tokens)
    todo = [(step, sum(int(sizes[indices].sum()) for indices in step.batches)) for step in plan[training.step :]]
    spent, waited, tokens_done = 0.0, 0.0, 0

    with bar("train", sum(tokens for _, tokens in todo), "tok") as shown:
        for (step, tokens), batches, wait in prefetch(lambda s: load(data, s[0], config.batch_tokens), todo):
            clock = time.perf_counter()
            lr = learning_rate(training.step, len(plan), config)
            row = optimiser_step(
                training, batches, lr, [[data.ids[i] for i in indices] for indices in step.batches]
            )
            training.counts["tokens"] += tokens
            seconds = time.perf_counter() - clock + wait
            spent, waited, tokens_done = spent + seconds, waited + wait, tokens_done + tokens
            speed = {"tokens_per_second": tokens / seconds, "waited_seconds": wait}
            metrics.write(training.step, "train", row | {"epoch": step.epoch} | speed)
            shown.update(tokens, f"loss {row['loss']:.3f}")

            last = training.step == len(plan)
            if len(heldout) and (last or is_due(config.eval_every, training.step, step)):
                row = evaluate(training, heldout)
                metrics.write(training.step, "eval", row)
                training.judge(row)
                tau = "no rounds" if row["tau"] is None else f"replayed τ {row['tau']:.3f}"
                say(f"step {training.step}: held-out loss {row['loss']:.4f}, {tau}")
            if last or training.best == training.step or is_due(config.checkpoint_every, training.step, step):
                checkpoint.save(root, training, provenance or {})
    metrics.close()
    checkpoint.publish(root, training.best or training.step, out)
    best = next((e for e in training.evals if e["step"] == training.best), {})
    return {
        "counts": {"steps": training.step, **training.counts, "samples": len(data), "heldout": len(heldout)},
        "best_step": training.best,
        **{k: best.get(k) for k in ("tau", "accept_rate_by_position", "loss")},
        "best": best,
        "evals": [{k: e[k] for k in ("step", "tau", "loss")} for e in training.evals],
        "tokens_per_second": tokens_done / spent if spent else None,
        "wait_share": waited / spent if spent else None,
        "warnings": warnings,
    }


def plan_run(data: Store, heldout: Store, config: TrainConfig, seed: int) -> tuple[list[StepPlan], list[str]]:
    """The optimiser steps of the run, and what its user should know about them."""
    if not len(data):
        raise EyasError(f"{data.folder} holds no training samples", "see what `prepare` has counted and set aside")
    if not data.supervised_counts.sum():
        raise EyasError(f"{data.folder} holds no supervised token: there is nothing to learn")
    arguments = data.lengths, config.batch_tokens, config.accumulation, seed, config.epochs
    plan, warnings = plan_steps(*arguments, config.max_steps), []
    if config.max_steps and (whole := len(plan_steps(*arguments))) != config.max_steps:
        warnings.append(
            f"max_steps is {config.max_steps}; train.epochs {config.epochs} would be {whole} optimiser steps"
        )
    if cut := int((data.lengths > config.batch_tokens).sum()):
        warnings.append(
            f"{cut} of {len(data)} samples are longer than train.batch_tokens {config.batch_tokens}: cut there"
        )
    if not len(heldout):
        warnings.append(
            "no held-out samples, so nothing says which step is best: the last is kept (see data.heldout)"
        )
    for text in warnings:
        warn(text)
    return plan, warnings


def try_largest(training: Training, data: Store, plan: list[StepPlan]) -> None:
    """On a GPU, run the micro-batch with most supervised tokens once: too little memory is said now, not in
    hours."""
    if training.noise.device.type == "cpu":
        return
    supervised, budget = data.supervised_counts, training.config.batch_tokens
    largest = max((indices for step in plan for indices in step.batches), key=lambda i: supervised[i].sum())
    try:
        forward(
            training, move(pack((data[int(i)] for i in largest), budget), training.noise.device)
        ).loss.backward()
    except torch.OutOfMemoryError as e:
        what = f"{budget} tokens, {supervised[largest].sum()} of them supervised"
        raise EyasError(f"a micro-batch of {what}, does not fit: {e}", "lower train.batch_tokens") from e
    training.optimizer.zero_grad()


def load(data: Store, step: StepPlan, budget: int) -> list[TrainBatch]:
    return [pack((data[int(i)] for i in indices), budget) for indices in step.batches]


def is_due(every: int | None, done: int, step: StepPlan) -> bool:
    return done % every == 0 if every else step.ends_epoch


def optimiser_step(
    training: Training, batches: list[TrainBatch], lr: float, ids: list[list[str]]
) -> dict[str, Any]:
    """Forward and backward over the micro-batches, clip, update. Returns the step's metrics as plain numbers.

    Raises EyasError naming the samples (`ids` of each micro-batch) when a loss or the gradient is not finite.
    """
    config, device = training.config, training.noise.device
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    counted = [counted_rows(b.supervised, b.doc_end, config.ttt_steps) for b in batches]  # each [K, N]
    totals = torch.stack([c.sum(1) for c in counted]).sum(0)  # [K]
    losses, sums = [], torch.zeros(3, config.ttt_steps, device=device)
    for batch in batches:
        output = forward(training, add_noise(training, move(batch, device)), totals)
        output.loss.backward()
        losses.append(output.loss.detach())
        sums += step_sums(output)
    norm = clip_gradients(list(training.trained().values()), config.grad_clip)
    numbers = torch.stack([norm, *losses]).tolist()  # the one place that waits for the device
    checked = [("loss", *pair) for pair in zip(numbers[1:], ids, strict=True)]
    for what, value, names in [*checked, ("gradient norm", numbers[0], list(chain(*ids)))]:
        if not math.isfinite(value):
            hint = "try a lower train.lr, or train.dtype float32; the checkpoints before this step are kept"
            raise EyasError(f"step {training.step + 1}: the {what} is {value}; samples: {', '.join(names)}", hint)
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step += 1
    training.counts["supervised"] += sum(len(b.targets) for b in batches)
    training.counts["rows_computed"] += sum(int(c.any(0).sum()) for c in counted)
    training.counts["rows_total"] += sum(len(b.input_ids) for b in batches)
    kl, hits, overlap = (sums.cpu() / totals.clamp(min=1)).tolist()
    means = {"loss_by_step": kl, "target_accuracy_by_step": hits, "overlap_by_step": overlap}
    return {"loss": sum(numbers[1:]), "lr": lr, "grad_norm": numbers[0], **means}


def move(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """What is computed with goes to the device; what the row plan is made from stays."""
    if device.type == "cpu":
        return batch
    fields = ("input_ids", "aux", "targets")
    return batch._replace(**{f: getattr(batch, f).pin_memory().to(device, non_blocking=True) for f in fields})


def add_noise(training: Training, batch: TrainBatch) -> TrainBatch:
    """Gaussian noise on the aux states, relative to the RMS of each state."""
    if not training.config.noise:
        return batch
    aux = batch.aux.float().unflatten(1, (training.model.config.num_aux, -1))  # [N, A, H]
    draw = torch.randn(aux.shape, generator=training.noise, device=aux.device)
    rms = aux.pow(2).mean(-1, keepdim=True).sqrt()  # [N, A, 1]
    return batch._replace(aux=torch.addcmul(aux, draw, rms, value=training.config.noise).flatten(1))


def products(training: Training) -> str:
    """Precision of the matrix products."""
    auto = "bfloat16" if training.noise.device.type == "cuda" else "float32"
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
    """[3, K]: KL, arg-max hits and overlap, each summed over the rows counted at TTT step k."""
    return torch.stack([output.kl.float(), output.hits.float(), output.overlap.float()])


@torch.no_grad()
def evaluate(training: Training, heldout: Store) -> dict[str, Any]:
    """Loss and replayed acceptance (`Replay.summary`) over all held-out samples: ratios of sums.

    `overlap_by_step`: mean of sum_v min(target, draft) at TTT step k, the acceptance of sampled drafts.
    `target_accuracy_by_step`: share of rows whose arg-max is the target's over the draft vocabulary.
    """
    config, device = training.config, training.noise.device
    sums, walked = torch.zeros(3, config.ttt_steps, dtype=torch.float64), []
    counts = torch.zeros(config.ttt_steps, dtype=torch.int64)
    training.model.eval()
    plan = plan_epoch(heldout.lengths, config.batch_tokens, seed=0, epoch=0)
    for _, batch, _ in prefetch(lambda ids: pack((heldout[int(i)] for i in ids), config.batch_tokens), plan):
        output = forward(training, move(batch, device))
        sums += step_sums(output).cpu()
        counts += output.counts.cpu()
        rows = (x.numpy() for x in (output.draft_tokens.cpu(), batch.input_ids, batch.supervised, batch.doc_end))
        walked.append(replay(*rows))
    training.model.train()
    kl, hits, overlap = (sums / counts.clamp(min=1)).tolist()
    weights = [config.ttt_decay**k for k in range(config.ttt_steps)]
    loss = sum(w * x for w, x in zip(weights, kl, strict=True)) / sum(weights)
    means = {"loss_by_step": kl, "target_accuracy_by_step": hits, "overlap_by_step": overlap}
    return {"loss": loss, **means, **sum(walked[1:], walked[0]).summary()}
