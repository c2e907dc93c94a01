"""Dry run: a few real optimiser steps on one small batch; what is saved goes to a temporary folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from eyas.draft import Eagle3DraftModel, TrainBatch, init_weights, load_draft, save_draft
from eyas.preflight.finding import Check, Finding, Subject, error, info
from eyas.train.batches import move, pack
from eyas.train.checkpoint import Training
from eyas.train.loop import forward, optimiser_step

BATCH_TOKENS = 512  # enough to reach every tensor, and a few seconds on a CPU


def training_works(s: Subject) -> Iterator[Finding]:
    fitting = np.cumsum([len(f.token_ids) for f in s.samples]) <= min(BATCH_TOKENS, s.config.train.batch_tokens)
    chosen = s.samples[: max(1, int(fitting.sum()))]
    batch, ids = pack(chosen, s.config.train.batch_tokens), [[f.id for f in chosen]]
    training = start(s, fresh_draft(s))
    batch = move(batch, training.device)
    frozen = dict(training.model.named_buffers())
    frozen |= {n: p for n, p in training.model.named_parameters() if not p.requires_grad}
    before = {n: t.detach().clone() for n, t in frozen.items()}

    lr = s.config.train.lr / 10  # there is no warm-up here
    losses = [optimiser_step(training, [batch], lr, ids)["loss"] for _ in range(s.config.preflight.steps)]
    losses.append(loss_of(training, batch))
    text = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {len(losses) - 1} steps on {len(chosen)} samples"
    if losses[-1] < losses[0]:
        yield info(text, evidence={"losses": losses})
    else:
        hint = "a lower train.lr, or features that teach this draft nothing"
        yield error(f"the loss does not fall: {text}", hint, {"losses": losses})
    if changed := [n for n, t in frozen.items() if not torch.equal(t, before[n])]:
        yield error(f"training changed {', '.join(changed)}, which must stay as the target has it")

    # After the steps, not before them: weights that start at zero pass no gradient on to what feeds them.
    forward(training, batch).loss.backward()
    gradients = {n: p.grad for n, p in training.trained().items()}
    if unreached := [n for n, g in gradients.items() if g is None or not g.any() or not g.isfinite().all()]:
        text = f"no gradient, or none that is finite, reaches {', '.join(unreached)}"
        yield error(text, "are the sampled answers too short? raise preflight.samples")

    with tempfile.TemporaryDirectory(prefix="eyas-dry-run-") as folder:
        save_draft(training.model, Path(folder))
        again = loss_of(start(s, load_draft(Path(folder), s.weights)), batch)
    same = abs(again - losses[-1]) <= 1e-6 * abs(losses[-1])
    text = f"saved and loaded again: loss {again:.6f}, before {losses[-1]:.6f}"
    yield Finding("info" if same else "error", text)


def fresh_draft(s: Subject) -> Eagle3DraftModel:
    """The draft as the train stage starts it."""
    model = s.new_draft()
    model.load_target(s.weights)
    init_weights(model, s.weights, s.spec, s.config.draft.init, s.config.seed)
    return model


def start(s: Subject, model: Eagle3DraftModel) -> Training:
    config = s.config.train.model_copy(update={"noise": 0.0})
    return Training(model.to(s.config.torch_device()).train(), config, s.config.seed)


@torch.no_grad()
def loss_of(training: Training, batch: TrainBatch) -> float:
    return float(forward(training, batch).loss)


CHECKS = [Check("training", "dry_run", ("memory", "contract"), training_works)]
