"""Dry run: a few real optimiser steps on one small batch; what is saved goes to a temporary folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from eyas.draft import Eagle3DraftModel, TrainBatch, init_weights, load_draft, save_draft
from eyas.features.contract import Features
from eyas.preflight.finding import Check, Finding, Subject
from eyas.train.batches import pack
from eyas.train.checkpoint import Training
from eyas.train.loop import forward, move, optimiser_step
from eyas.train.optim import adamw

BATCH_TOKENS = 512  # enough to reach every tensor, and a few seconds on a CPU


def training_works(s: Subject) -> Iterator[Finding]:
    chosen = small_batch(s)
    batch = pack(chosen, s.config.train.batch_tokens)
    training = start(s, fresh_draft(s))
    kept = {n: t.detach().clone() for n, t in frozen(training.model).items()}
    losses = steps(s, training, batch, s.config.train.lr)
    if changed := [n for n, t in frozen(training.model).items() if not torch.equal(t, kept[n])]:
        yield Finding("error", f"training changed {', '.join(changed)}, which must stay as the target has it")
    text = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {len(losses) - 1} steps on {len(chosen)} samples"
    if losses[-1] < losses[0]:
        yield Finding("info", text, evidence={"losses": losses})
    else:
        gentle = steps(s, start(s, fresh_draft(s)), batch, s.config.train.lr / 10)
        evidence = {"losses": losses, "losses_at_a_tenth_of_lr": gentle}
        if gentle[-1] < gentle[0]:
            text += ", but falls at a tenth of train.lr"
            yield Finding("warning", text, "lower train.lr, or lengthen train.warmup", evidence)
        else:
            yield Finding(
                "error", f"the loss does not fall: {text}", "the features teach this draft nothing", evidence
            )

    # After the steps, not before them: weights that start at zero pass no gradient on to what feeds them.
    forward(training, move(batch, training.noise.device)).loss.backward()
    gradients = {n: p.grad for n, p in training.trained().items()}
    if unreached := [n for n, g in gradients.items() if g is None or not g.any() or not g.isfinite().all()]:
        text = f"no gradient, or none that is finite, reaches {', '.join(unreached)}"
        yield Finding("error", text, "are the sampled answers too short? raise preflight.samples")

    with tempfile.TemporaryDirectory(prefix="eyas-dry-run-") as folder:
        save_draft(training.model, Path(folder))
        again = loss_of(start(s, load_draft(Path(folder), s.weights)), batch)
    same = abs(again - losses[-1]) <= 1e-6 * abs(losses[-1])
    yield Finding(
        "info" if same else "error", f"saved and loaded again: loss {again:.6f}, before {losses[-1]:.6f}"
    )


def small_batch(s: Subject) -> list[Features]:
    """As many of the sampled features as fit into BATCH_TOKENS and into one micro-batch."""
    budget, chosen = min(BATCH_TOKENS, s.config.train.batch_tokens), s.samples[:1]
    for features in s.samples[1:]:
        if sum(len(f.token_ids) for f in [*chosen, features]) <= budget:
            chosen.append(features)
    return chosen


def fresh_draft(s: Subject) -> Eagle3DraftModel:
    model = Eagle3DraftModel(s.shape, *s.tables)
    model.load_target(s.weights)
    init_weights(model, s.weights, s.spec, s.config.draft.init, s.config.seed)
    return model


def start(s: Subject, model: Eagle3DraftModel) -> Training:
    config, device = s.config.train.model_copy(update={"noise": 0.0}), s.config.torch_device()
    model = model.to(device).train()
    return Training(model, adamw(model, config), torch.Generator(device), config, s.config.seed)


def frozen(model: Eagle3DraftModel) -> dict[str, torch.Tensor]:
    """Every tensor that training must leave alone."""
    return dict(model.named_buffers()) | {n: p for n, p in model.named_parameters() if not p.requires_grad}


def loss_of(training: Training, batch: TrainBatch) -> float:
    with torch.no_grad():
        return float(forward(training, move(batch, training.noise.device)).loss)


def steps(s: Subject, training: Training, batch: TrainBatch, lr: float) -> list[float]:
    """The loss before each step on the same batch, and after the last."""
    ids = [[f.id for f in s.samples]]
    rows = [optimiser_step(training, [batch], lr, ids) for _ in range(s.config.preflight.steps)]
    return [*(row["loss"] for row in rows), loss_of(training, batch)]


CHECKS = [Check("training", "dry_run", ("memory", "contract"), training_works)]
