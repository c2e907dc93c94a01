"""The training loop: top to bottom, one optimiser step after the other.

Losses are means over the counted rows of the whole optimiser step: how many there are follows from the masks, before
the first forward pass, so the losses and gradients of the micro-batches simply add up. Weights and AdamW's moments are
float32; with bfloat16 only the matrix products are, over copies cast in every forward pass.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from eyas.train.checkpoint import Progress
from eyas.train.metrics import Metrics
from eyas.train.optim import adamw, clip_gradients, learning_rate
from eyas.train.replay import replay


@dataclass(frozen=True)
class Trainer:
    """What stays the same from the first step to the last."""

    model: Eagle3DraftModel
    optimizer: torch.optim.AdamW
    noise: torch.Generator
    config: TrainConfig
    dtype: torch.dtype  # of matrix products
    device: str


def fit(
    model: Eagle3DraftModel,
    data: Store,
    heldout: Store,
    config: TrainConfig,
    out: Path,
    seed: int = 0,
    device: str = "cpu",
    provenance: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train `model` (already initialised) and leave the best step's `model.safetensors` and `draft.json` in `out`.

    Goes on from the newest whole checkpoint in `out`/checkpoints and ends with the same bytes as without a break.
    Best is the highest replayed τ on `heldout` (ties: the lower loss); without held-out answers, the last step.
    Returns the stage's result. Raises EyasError for missing data, too little disk, a loss or gradient that is not
    finite.
    """
    plan, warnings = plan_run(data, heldout, config, seed)
    half = config.dtype == "bfloat16" or (config.dtype == "auto" and device.startswith("cuda"))
    model = model.to(device).train()
    noise = torch.Generator(device).manual_seed(seed)
    trainer = Trainer(
        model, adamw(model, config), noise, config, torch.bfloat16 if half else torch.float32, device
    )
    root = out / "checkpoints"
    progress = checkpoint.resume(root, model, trainer.optimizer, noise, config, seed)
    checkpoint.check_disk(root, model, config.keep_checkpoints)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(
        f"draft of 1 layer, {trained:,} trained parameters; loss KL(target || draft), {config.ttt_steps} TTT steps; "
        f"{len(plan)} optimiser steps, products in {str(trainer.dtype).removeprefix('torch.')} on {device}"
    )

    sizes = np.minimum(data.lengths, config.batch_tokens)
    todo = plan[progress.step :]
    metrics = Metrics(out / "logs", progress.step)
    spent, waited, tokens_done = 0.0, 0.0, 0
    with bar("train", sum(tokens_of(step, sizes) for step in todo), "tok") as shown:
        for step, batches, wait in prefetch(lambda s: load(s, data, config.batch_tokens), todo):
            clock = time.perf_counter()
            lr = learning_rate(progress.step, len(plan), config)
            row = optimiser_step(trainer, batches, lr, progress, lambda i, step=step: names(data, step, i))
            tokens = tokens_of(step, sizes)
            seconds = time.perf_counter() - clock + wait
            spent, waited, tokens_done = spent + seconds, waited + wait, tokens_done + tokens
            progress.counts["tokens"] += tokens
            row |= {"epoch": step.epoch, "tokens_per_second": tokens / seconds, "waited_seconds": wait}
            metrics.write(progress.step, "train", row)
            shown.update(tokens, f"loss {row['loss']:.3f}")

            last = progress.step == len(plan)
            if len(heldout) and (last or is_due(config.eval_every, progress.step, step)):
                row = evaluate(trainer, heldout)
                metrics.write(progress.step, "eval", row)
                progress.judge(row)
                say(
                    f"step {progress.step}: held-out loss {row['loss']:.4f}, τ {row['tau'] or math.nan:.3f} replayed"
                )
            if last or progress.best == progress.step or is_due(config.checkpoint_every, progress.step, step):
                state = {
                    "epoch": step.epoch,
                    "total_steps": len(plan),
                    "seed": seed,
                    "config": config.model_dump(mode="json"),
                }
                checkpoint.save(root, model, trainer.optimizer, noise, progress, state, provenance)
                checkpoint.prune(root, config.keep_checkpoints, progress.best)
    metrics.close()
    checkpoint.publish(root, progress.best or progress.step, out)
    return {
        "counts": {"steps": progress.step, **progress.counts, "samples": len(data), "heldout": len(heldout)},
        "best_step": progress.best,
        **next(
            (e for e in progress.evals if e["step"] == progress.best), {"tau": None, "accept_rate_by_position": []}
        ),
        "evals": [{k: e[k] for k in ("step", "tau", "loss")} for e in progress.evals],
        "tokens_per_second": tokens_done / spent if spent else None,
        "wait_share": waited / spent if spent else None,
        "warnings": warnings,
    }


def plan_run(data: Store, heldout: Store, config: TrainConfig, seed: int) -> tuple[list[StepPlan], list[str]]:
    """The optimiser steps of the run, and what its user should know about them."""
    if not len(data):
        raise EyasError(
            f"{data.folder} holds no training samples", "see the counts and quarantine of the prepare stage"
        )
    if not data.supervised_counts.sum():
        raise EyasError(f"{data.folder} holds no supervised token: there is nothing to learn")
    plan = plan_steps(
        data.lengths, config.batch_tokens, config.accumulation, seed, config.epochs, config.max_steps
    )
    warnings = []
    if config.max_steps:
        whole = len(plan_steps(data.lengths, config.batch_tokens, config.accumulation, seed, config.epochs))
        if whole != config.max_steps:
            warnings.append(
                f"max_steps is {config.max_steps}; {config.epochs} epochs of the data are {whole} optimiser steps"
            )
    if cut := int((data.lengths > config.batch_tokens).sum()):
        warnings.append(
            f"{cut} of {len(data)} samples are longer than train.batch_tokens {config.batch_tokens} and cut there"
        )
    if not len(heldout):
        warnings.append(
            "no held-out samples: nothing says which step is best, the last one is kept (see data.heldout)"
        )
    for text in warnings:
        warn(text)
    return plan, warnings


def load(step: StepPlan, data: Store, budget: int) -> list[TrainBatch]:
    return [pack((data[int(i)] for i in indices), budget) for indices in step.batches]


def tokens_of(step: StepPlan, sizes: np.ndarray) -> int:
    return sum(int(sizes[indices].sum()) for indices in step.batches)


def names(data: Store, step: StepPlan, micro: int | None) -> str:
    """Sample ids of one micro-batch, or of the whole step."""
    chosen = step.batches if micro is None else [step.batches[micro]]
    return ", ".join(data.ids[int(i)] for indices in chosen for i in indices)


def is_due(every: int | None, done: int, step: StepPlan) -> bool:
    return done % every == 0 if every else step.ends_epoch


def optimiser_step(
    trainer: Trainer, batches: list[TrainBatch], lr: float, progress: Progress, names: Callable[[int | None], str]
) -> dict[str, Any]:
    """Forward and backward over the micro-batches, clip, update. Returns the step's metrics as plain numbers."""
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr
    counted = [counted_rows(b.supervised, b.doc_end, trainer.config.ttt_steps) for b in batches]  # each [K, N]
    totals = torch.stack([c.sum(1) for c in counted]).sum(0)  # [K]
    losses, sums = [], []
    for batch in batches:
        output = forward(trainer, with_noise(trainer, move(batch, trainer.device)), totals)
        output.loss.backward()
        losses.append(output.loss.detach().float())
        sums.append(per_step_sums(output))
    norm = clip_gradients([p for p in trainer.model.parameters() if p.requires_grad], trainer.config.grad_clip)
    means = torch.stack(sums).sum(0) / totals.clamp(min=1).to(trainer.device)  # [3, K]
    numbers = torch.cat(
        [norm.reshape(1), torch.stack(losses), means.flatten()]
    ).tolist()  # the one wait for the device
    gradient, micro_losses = numbers[0], numbers[1 : 1 + len(losses)]
    for i, loss in enumerate(micro_losses):
        if not math.isfinite(loss):
            raise EyasError(
                f"step {progress.step + 1}: the loss is {loss}; samples of the micro-batch: {names(i)}", _NAN_HINT
            )
    if not math.isfinite(gradient):
        raise EyasError(
            f"step {progress.step + 1}: the gradient norm is {gradient}; samples of the step: {names(None)}",
            _NAN_HINT,
        )
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    progress.step += 1
    progress.counts["supervised"] += sum(len(b.targets) for b in batches)
    progress.counts["rows_computed"] += sum(int(c.any(0).sum()) for c in counted)
    progress.counts["rows_total"] += sum(len(b.input_ids) for b in batches)
    kl, hits, overlap = means.tolist()
    return {
        "loss": sum(micro_losses), "lr": lr, "grad_norm": gradient, "loss_by_step": kl,
        "accuracy_by_position": hits, "overlap_by_position": overlap,
    }  # fmt: skip


_NAN_HINT = "a lower train.lr or train.dtype float32 may help; checkpoints of earlier steps are kept"


def move(batch: TrainBatch, device: str) -> TrainBatch:
    """What is computed with goes to the device; what the row plan is made from stays."""
    if device == "cpu":
        return batch
    moved = {
        k: getattr(batch, k).pin_memory().to(device, non_blocking=True) for k in ("input_ids", "aux", "targets")
    }
    return batch._replace(**moved)


def with_noise(trainer: Trainer, batch: TrainBatch) -> TrainBatch:
    """Gaussian noise on the aux states, relative to the RMS of each state."""
    if not trainer.config.noise:
        return batch
    width = trainer.model.config.target_hidden_size
    aux = batch.aux.float().unflatten(1, (-1, width))  # [N, A, H]
    draw = torch.randn(aux.shape, generator=trainer.noise, device=aux.device)
    rms = aux.pow(2).mean(-1, keepdim=True).sqrt()  # [N, A, 1]
    return batch._replace(aux=torch.addcmul(aux, draw, rms, value=trainer.config.noise).flatten(1))


def forward(trainer: Trainer, batch: TrainBatch, totals: Tensor | None = None) -> TTTOutput:
    """The model's forward pass, its products in `trainer.dtype`; gradients reach the float32 weights."""
    arguments = {
        "batch": batch,
        "ttt_steps": trainer.config.ttt_steps,
        "ttt_step_loss_decay": trainer.config.ttt_decay,
    }
    if trainer.dtype == torch.float32:
        return trainer.model(**arguments, totals=totals)
    copies = {name: p.to(trainer.dtype) for name, p in trainer.model.named_parameters()}
    return functional_call(trainer.model, copies, kwargs=arguments | {"totals": totals})


def per_step_sums(output: TTTOutput) -> Tensor:
    """[3, K]: KL, arg-max hits and overlap, each summed over the rows counted at TTT step k."""
    return torch.stack([output.kl.float(), output.hits.float(), output.overlap.float()])


@torch.no_grad()
def evaluate(trainer: Trainer, heldout: Store) -> dict[str, Any]:
    """Loss and replayed acceptance (`Replay.summary`) over all held-out samples; ratios of sums, so the batches do not
    matter. `overlap_by_position`: mean of sum_v min(target, draft), the acceptance of sampling at each TTT step."""
    budget, sums, counts, walked = trainer.config.batch_tokens, [], [], []
    trainer.model.eval()
    plan = plan_epoch(heldout.lengths, budget, seed=0, epoch=0)
    for _, batch, _ in prefetch(lambda indices: pack((heldout[int(i)] for i in indices), budget), plan):
        output = forward(trainer, move(batch, trainer.device))
        sums.append(per_step_sums(output).double().cpu())
        counts.append(output.counts.cpu())
        walked.append(
            replay(
                output.draft_tokens.cpu().numpy(),
                *(x.numpy() for x in (batch.input_ids, batch.supervised, batch.doc_end)),
            )
        )
    trainer.model.train()
    kl, _, overlap = (torch.stack(sums).sum(0) / torch.stack(counts).sum(0).clamp(min=1)).tolist()
    weights = [trainer.config.ttt_decay**k for k in range(trainer.config.ttt_steps)]
    loss = sum(w * x for w, x in zip(weights, kl, strict=True)) / sum(weights)
    return {
        "loss": loss,
        "loss_by_step": kl,
        "overlap_by_position": overlap,
        **sum(walked[1:], walked[0]).summary(),
    }
