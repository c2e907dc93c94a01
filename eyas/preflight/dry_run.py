"""Dry run: a few real optimiser steps on one small batch; what is saved goes to a temporary folder."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from eyas.draft import Eagle3DraftModel, TrainBatch, load_draft
from eyas.errors import EyasError
from eyas.features.contract import Features
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.preflight.schedule import training_size
from eyas.progress import hushed
from eyas.train import checkpoint
from eyas.train.batches import move, pack
from eyas.train.checkpoint import Training
from eyas.train.loop import forward, optimiser_step

BATCH_TOKENS = 512  # enough to reach every tensor, and a few seconds on a CPU
FEW_TOKENS = 128  # for what does not hang on how many there are
LEARNT = 32  # tokens of an answer that the batch holds at least


def training_works(s: Subject) -> Iterator[Finding]:
    chosen, batch = small_batch(s, BATCH_TOKENS)
    ids = [[f.id for f in chosen]]
    training = start(s, s.trial)
    frozen = dict(training.model.named_buffers())
    frozen |= {n: p for n, p in training.model.named_parameters() if not p.requires_grad}
    before = {n: t.detach().clone() for n, t in frozen.items()}

    lr, losses, clock = s.config.train.lr / 10, [], []  # there is no warm-up here
    for _ in range(s.config.preflight.steps):
        begin = time.perf_counter()
        losses.append(optimiser_step(training, [batch], lr, ids)["loss"])
        clock.append(time.perf_counter() - begin)
    losses.append(loss_of(training, batch))
    text = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {len(losses) - 1} steps on {len(chosen)} samples"
    if losses[-1] < losses[0]:
        yield info(text, evidence={"losses": losses})
    else:
        hint = "a lower train.lr, or features that teach this draft nothing"
        yield error(f"the loss does not fall: {text}", hint, {"losses": losses})
    if changed := [n for n, t in frozen.items() if not torch.equal(t, before[n])]:
        text = f"training changed {', '.join(changed)}, which must stay as the target has it"
        yield error(text, "see draft.train_lm_head")
    yield time_left(s, min(clock), len(batch.input_ids))

    # After the steps, not before them: weights that start at zero pass no gradient on to what feeds them.
    forward(training, batch).loss.backward()
    gradients = {n: p.grad for n, p in training.trained().items()}
    if unreached := [n for n, g in gradients.items() if g is None or not g.any() or not g.isfinite().all()]:
        text = f"no gradient, or none that is finite, reaches {', '.join(unreached)}"
        yield error(text, "are the sampled answers too short? raise preflight.samples")
    training.optimizer.zero_grad()


def odd_batches_do_no_harm(s: Subject) -> Iterator[Finding]:
    """A batch that nothing is learnt from changes nothing; bfloat16 gives nearly the loss of float32."""
    _, batch = small_batch(s, FEW_TOKENS)
    training = start(s, s.trial)
    masked = batch._replace(supervised=torch.zeros_like(batch.supervised), targets=batch.targets[:0])
    loss = forward(training, masked).loss
    loss.backward()
    wrong = [n for n, p in training.trained().items() if p.grad is not None and p.grad.any()]
    if loss or wrong:
        text = f"a batch without a supervised token gives loss {loss.item()} and moves {wrong or 'nothing'}"
        yield error(text, "leave such samples out, and report this")
    training.optimizer.zero_grad()
    whole = loss_of(training, batch, "float32")
    half = loss_of(training, batch, "bfloat16")
    text = f"loss {half:.4f} in bfloat16, {whole:.4f} in float32"
    if not np.isfinite(half):
        yield error(text, "train.dtype float32; states or weights are too large for bfloat16")
    elif abs(half - whole) > 0.05 * whole:
        yield warning(text, "train.dtype float32 keeps what bfloat16 loses here")
    else:
        yield info(f"{text}; a batch without a supervised token changes nothing")


def checkpoints_resume(s: Subject) -> Iterator[Finding]:
    """Save, load as a draft, resume as a training: the same loss, and the same next step, bit for bit."""
    chosen, batch = small_batch(s, FEW_TOKENS)
    ids, lr = [[f.id for f in chosen]], s.config.train.lr / 10
    training = start(s, s.trial)
    if reason := no_room(3 * sum(p.nbytes for p in training.model.parameters())):  # weights and two moments
        yield info(f"not tried: {reason}")
        return
    optimiser_step(training, [batch], lr, ids)  # so that there are moments to keep
    with tempfile.TemporaryDirectory(prefix="eyas-dry-run-") as folder, hushed():
        checkpoint.save(Path(folder), training, {})
        path = checkpoint.folder_of(Path(folder), training.step)
        before, again = loss_of(training, batch), loss_of(start(s, load_draft(path, s.weights)), batch)
        resumed = start(s, load_draft(path, s.weights))
        with torch.no_grad():
            for p in resumed.trained().values():  # what is not restored would show
                p.zero_()
        checkpoint.resume(Path(folder), resumed)
    for run in (training, resumed):
        optimiser_step(run, [batch], lr, ids)
    after, next_step = loss_of(training, batch), loss_of(resumed, batch)
    for what, found, wanted in (
        ("saved and loaded again", again, before),
        ("resumed, a step later", next_step, after),
    ):
        same = abs(found - wanted) <= 1e-6 * abs(wanted)
        hint = "" if same else "something that training needs is not saved: report this"
        yield Finding("info" if same else "error", f"{what}: loss {found:.6f}, without a break {wanted:.6f}", hint)


def no_room(needed: int) -> str:
    """Why so many bytes cannot be written to the temporary folder; empty when they can."""
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    text = f"{place} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} would be written; TMPDIR names another place"
    return text if needed > 0.8 * free else ""


def time_left(s: Subject, seconds: float, tokens: int) -> Finding:
    """What the whole run takes at the pace of this small batch; large ones on a GPU go faster."""
    rate, (known, _), longest = tokens / seconds, training_size(s), s.config.train.max_steps
    total = (known or int(s.store.lengths.sum())) * s.config.train.epochs
    if longest:
        total = min(total, longest * s.config.train.batch_tokens * s.config.train.accumulation)
    hours, minutes = divmod(round(total / rate / 60), 60)
    text = f"{rate:,.0f} tokens/s on a batch of {tokens}: about {hours} h {minutes} min for {total:,} tokens"
    return info(text, evidence={"tokens_per_second": round(rate), "tokens": total, "seconds": round(total / rate)})


def small_batch(s: Subject, most: int) -> tuple[list[Features], TrainBatch]:
    """Samples of `most` tokens together, or one cut there; more where the shortest prompt is longer. Raises
    EyasError when none of them would be learnt from."""

    def begins(f: Features) -> int:
        return int(f.loss_mask.int().argmax()) if f.loss_mask.any() else len(f.loss_mask)

    samples, limit = sorted(s.store.spread(s.config.preflight.samples), key=begins), s.config.train.batch_tokens
    if (first := begins(samples[0])) + 1 >= limit:
        text = (
            f"the sampled answers begin at token {first} or later, train.batch_tokens {limit} cuts samples before"
        )
        raise EyasError(text, "raise train.batch_tokens: nothing would be learnt from them")
    budget = min(max(most, first + LEARNT), limit)
    fitting = np.cumsum([len(f.token_ids) for f in samples]) <= budget
    chosen = samples[: max(1, int(fitting.sum()))]
    return chosen, move(pack(chosen, budget), torch.device(s.config.torch_device()))


def start(s: Subject, model: Eagle3DraftModel) -> Training:
    config = s.config.train.model_copy(update={"noise": 0.0})
    return Training(model.to(s.config.torch_device()).train(), config, s.config.seed)


@torch.no_grad()
def loss_of(training: Training, batch: TrainBatch, dtype: str = "") -> float:
    config = training.config
    training.config = config.model_copy(update={"dtype": dtype or config.dtype})
    loss = float(forward(training, batch).loss)
    training.config = config
    return loss


CHECKS = [
    Check("training", "dry_run", ("fresh", "contract"), training_works),
    Check("batches", "dry_run", ("training",), odd_batches_do_no_harm),
    Check("resume", "dry_run", ("training",), checkpoints_resume),
]
