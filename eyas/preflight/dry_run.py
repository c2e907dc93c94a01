"""Dry run: a few real optimiser steps on one small batch; what is saved goes to a temporary folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from eyas.draft import Eagle3DraftModel, TrainBatch, init_weights, load_draft, save_draft
from eyas.preflight.finding import Check, Finding, Subject
from eyas.train.batches import pack
from eyas.train.checkpoint import Progress
from eyas.train.loop import Trainer, forward, move, optimiser_step
from eyas.train.optim import adamw


def training_works(s: Subject) -> Iterator[Finding]:
    batch, count = small_batch(s)
    trainer = trainer_of(s, fresh_draft(s))
    forward(trainer, batch).loss.backward()
    named = [(n, p.grad) for n, p in trainer.model.named_parameters() if p.requires_grad]
    if unreached := [n for n, g in named if g is None or not g.any() or not g.isfinite().all()]:
        text = f"no gradient, or none that is finite, reaches {', '.join(unreached)}"
        yield Finding("error", text, "are the sampled answers too short? raise preflight.samples")
    trainer.optimizer.zero_grad()

    kept = {n: t.detach().clone() for n, t in frozen(trainer.model).items()}
    losses = steps(s, trainer, batch, s.config.train.lr)
    if changed := [n for n, t in frozen(trainer.model).items() if not torch.equal(t, kept[n])]:
        yield Finding("error", f"training changed {', '.join(changed)}, which must stay as the target has it")
    text = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {len(losses) - 1} steps on {count} samples"
    if losses[-1] < losses[0]:
        yield Finding("info", text, evidence={"losses": losses})
    else:
        gentle = steps(s, trainer_of(s, fresh_draft(s)), batch, s.config.train.lr / 10)
        evidence = {"losses": losses, "losses_at_a_tenth_of_lr": gentle}
        if gentle[-1] < gentle[0]:
            text += ", but falls at a tenth of train.lr"
            yield Finding("warning", text, "lower train.lr, or lengthen train.warmup", evidence)
        else:
            yield Finding(
                "error", f"the loss does not fall: {text}", "the features teach this draft nothing", evidence
            )

    with tempfile.TemporaryDirectory(prefix="eyas-dry-run-") as folder:
        save_draft(trainer.model, Path(folder))
        again = loss_of(trainer_of(s, load_draft(Path(folder), s.weights)), batch)
    same = abs(again - losses[-1]) <= 1e-6 * abs(losses[-1])
    yield Finding(
        "info" if same else "error", f"saved and loaded again: loss {again:.6f}, before {losses[-1]:.6f}"
    )


def small_batch(s: Subject) -> tuple[TrainBatch, int]:
    """As many of the sampled features as fit into one micro-batch, and how many those are."""
    budget, chosen = s.config.train.batch_tokens, s.samples[:1]
    for features in s.samples[1:]:
        if sum(len(f.token_ids) for f in [*chosen, features]) <= budget:
            chosen.append(features)
    return move(pack(chosen, budget), s.config.torch_device()), len(chosen)


def fresh_draft(s: Subject) -> Eagle3DraftModel:
    model = Eagle3DraftModel(s.shape, *s.tables)
    model.load_target(s.weights)
    init_weights(model, s.weights, s.spec, s.config.draft.init, s.config.seed)
    return model


def trainer_of(s: Subject, model: Eagle3DraftModel) -> Trainer:
    train, device = s.config.train.model_copy(update={"noise": 0.0}), s.config.torch_device()
    half = train.dtype == "bfloat16" or (train.dtype == "auto" and device == "cuda")
    model, dtype = model.to(device).train(), torch.bfloat16 if half else torch.float32
    return Trainer(model, adamw(model, train), torch.Generator(device), train, dtype, device)


def frozen(model: Eagle3DraftModel) -> dict[str, torch.Tensor]:
    """Every tensor that training must leave alone."""
    return dict(model.named_buffers()) | {n: p for n, p in model.named_parameters() if not p.requires_grad}


def loss_of(trainer: Trainer, batch: TrainBatch) -> float:
    with torch.no_grad():
        return float(forward(trainer, batch).loss)


def steps(s: Subject, trainer: Trainer, batch: TrainBatch, lr: float) -> list[float]:
    """The loss before each step on the same batch, and after the last."""
    progress, ids = Progress(), ", ".join(f.id for f in s.samples)
    rows = [optimiser_step(trainer, [batch], lr, progress, lambda _: ids) for _ in range(s.config.preflight.steps)]
    return [*(row["loss"] for row in rows), loss_of(trainer, batch)]


CHECKS = [Check("training", "dry_run", ("memory", "contract"), training_works)]
