"""Config: steps, intervals and rates that cannot do what they are for; the split; where the run is written."""

import os
from collections.abc import Iterator
from pathlib import Path

from eyas.pipeline import read_manifest, stages_of
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning


def steps_and_intervals_make_sense(s: Subject) -> Iterator[Finding]:
    train, (tokens, samples) = s.config.train, training_size(s)
    whole, steps = train.batch_tokens * train.accumulation, train.max_steps
    about = "about " * (not steps)
    if tokens:
        each = max(1, round(tokens / whole))  # optimiser steps of an epoch
        steps = steps or each * train.epochs
        text = f"{about}{steps:,} optimiser steps of up to {whole:,} tokens; an epoch has {tokens:,} tokens"
        yield info(text, evidence={"steps": steps, "steps_per_epoch": each, "tokens": tokens})
        if whole > tokens:
            text = f"an optimiser step could hold {whole:,} tokens (train.batch_tokens {train.batch_tokens:,} × "
            text += f"train.accumulation {train.accumulation}), all training data have {tokens:,}"
            yield warning(text, "lower them: each epoch is a single step")
        elif samples < train.accumulation:
            text = f"train.accumulation {train.accumulation} is more than the {samples} samples"
            yield warning(text, "lower it: there are not as many micro-batches")
    for key in ("eval_every", "checkpoint_every"):
        every = getattr(train, key)
        if every and steps and every > steps:
            text = f"train.{key} {every} never fires: the run has {about}{steps} optimiser steps"
            yield warning(text, "lower it, or leave it out for once an epoch")
    if steps and train.warmup and train.warmup * steps < 0.5:
        text = f"train.warmup {train.warmup} of {steps} steps is none: the first step has the full rate"
        yield info(text, "raise it to a few steps for a new draft")


def rates_are_sane(s: Subject) -> Iterator[Finding]:
    train = s.config.train
    low, high = train.betas
    if not (0 <= low < 1 and 0 <= high < 1):
        yield error(f"train.betas {[low, high]}: both must be at least 0 and below 1", "the usual are [0.9, 0.95]")
    elif low > high:
        yield warning(
            f"train.betas {[low, high]} are in the wrong order", "the first is the gradient's: [0.9, 0.95]"
        )
    if train.lr >= 1:
        yield error(f"train.lr {train.lr:g} would destroy the draft in one step", "the usual is 1e-4 to 1e-3")
    elif train.lr > 2e-2 or train.lr < 1e-7:
        yield warning(
            f"train.lr {train.lr:g} is far from what drafts are trained with", "the usual is 1e-4 to 1e-3"
        )
    if train.warmup >= 1:
        yield warning("train.warmup 1 makes the whole run a warm-up", "it is a share: 0.02 is 2 % of the steps")
    if train.weight_decay * train.lr > 1e-2:
        text = (
            f"train.weight_decay {train.weight_decay:g} takes {train.weight_decay * train.lr:.1%} off every step"
        )
        yield warning(text, "the usual is 0 to 0.1")
    if train.noise > 1:
        yield warning(
            f"train.noise {train.noise:g} is louder than the states themselves", "it is a share of their RMS"
        )


def training_size(s: Subject) -> tuple[int, int]:
    """(tokens, samples) to train on as prepare counted them; zeros before it has run."""
    manifest = read_manifest(Path(s.config.run_dir) / "prepare")
    counts = manifest.get("counts", {}) if manifest else {}
    if not counts.get("samples"):
        return 0, 0
    return counts["tokens"] * counts["train"] // counts["samples"], counts["train"]


def split_is_there(s: Subject) -> Iterator[Finding]:
    heldout, prompts = s.config.data.heldout, s.config.evaluate.heldout_prompts
    manifest = read_manifest(Path(s.config.run_dir) / "prepare")
    counts = manifest.get("counts", {}) if manifest else {}
    if not heldout:
        yield warning("data.heldout is 0: nothing tells the best step, the last is kept", "set it to 0.05, say")
    elif counts.get("heldout") == 0:
        text = f"data.heldout {heldout} of {counts['samples']} samples held none out"
        yield warning(text, "raise it: which side a conversation falls to hangs on a hash of its first prompt")
    elif heldout > 0.5:
        yield warning(
            f"data.heldout {heldout:g} keeps most of the data from training", "it is a share: 0.05 is 5 %"
        )
    elif 0 < counts.get("heldout", 0) < prompts:
        text = f"evaluate.heldout_prompts {prompts}, but only {counts['heldout']} samples are held out"
        yield info(f"{text}: all of them are decoded")


def outputs_can_be_written(s: Subject) -> Iterator[Finding]:
    """Looked at, not tried: the preflight writes nothing into a run."""
    run = Path(s.config.run_dir)
    there = next(p for p in (run, *run.resolve().parents) if p.exists())
    if not there.is_dir():
        yield error(f"run_dir {run}: {there} is a file", "name a folder, or move the file away")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield error(f"run_dir {run}: {there} is not writable", "choose another run_dir, or mend its permissions")
    whole = run.resolve()
    for source in s.config.data.sources:
        stage = next(
            (t.name for t in stages_of(s.config) if (whole / t.name) in Path(source).resolve().parents), ""
        )
        if stage:
            text = f"data.sources has {source}, which lies in this run's own {stage} folder"
            yield error(text, f"move it out: it is deleted when {stage} runs again")
    target = Path(s.target_name).expanduser()
    if target.is_dir() and target.resolve() in (whole, *whole.parents):
        yield warning(f"run_dir {run} lies inside the target's folder", "keep runs apart from models")


CHECKS = [
    Check("schedule", "config", (), steps_and_intervals_make_sense),
    Check("rates", "config", (), rates_are_sane),
    Check("split", "config", (), split_is_there),
    Check("outputs", "config", (), outputs_can_be_written),
]
