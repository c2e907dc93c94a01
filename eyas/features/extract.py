"""Stage extract: run the target once over every sample and keep the states that the draft reads."""

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from eyas.config import ExtractConfig
from eyas.data.samples import Sample, read_samples
from eyas.errors import EyasError
from eyas.features.contract import BadFeatures, FeatureMeta, Features
from eyas.features.store import Store, StoreWriter
from eyas.files import sha256_file, sha256_json
from eyas.pipeline import Context
from eyas.progress import bar, say, warn
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec, default_aux_layers
from eyas.target.weights import TargetWeights

WINDOW = 4096  # samples sorted by length together: little padding, yet every shard sees all lengths
TOKENIZER_FILES = ("tokenizer*", "special_*", "added_*", "vocab*", "merges*", "*.model", "chat_*")


def run(ctx: Context) -> dict[str, Any]:
    """Write `features/train/` and `features/heldout/`, a store each."""
    config, asked = ctx.config, ctx.config.target
    spec = TargetSpec.load(asked.model, asked.revision)
    samples = read_samples(ctx.input("prepare") / "samples.parquet", target=spec)
    target = Target.load(spec, asked.dtype, config.torch_device(), asked.attention, asked.trust_remote_code)
    meta = FeatureMeta(
        target=spec.name,
        target_fingerprint=spec.fingerprint,
        head_fingerprint=TargetWeights(spec).fingerprint(),
        tokenizer_fingerprint=tokenizer_fingerprint(spec.path),
        aux_layers=tuple(config.extract.aux_layers or default_aux_layers(spec.num_layers)),
        hidden_size=spec.hidden_size,
        engine=f"transformers {version('transformers')}",
        engine_dtype=str(target.model.dtype).removeprefix("torch."),
    )
    counts: dict[str, int] = {}
    shards, skipped, ran, started = [], [], 0, time.perf_counter()
    for split in ("train", "heldout"):
        chosen = [s for s in samples if s.split == split]
        store, tokens = extract(target, chosen, ctx.out / "features" / split, meta, config.extract)
        counts[split], ran = len(store), ran + tokens
        shards, skipped = shards + store.shards, skipped + store.skipped
    rate = ran / (time.perf_counter() - started)
    counts |= {k: sum(s[k] for s in shards) for k in ("samples", "tokens", "supervised", "bytes")}
    counts |= {"shards": len(shards), "skipped": len(skipped)}
    say(f"{counts['samples']} samples, {counts['bytes'] / 1e6:,.0f} MB; {rate:,.0f} tokens/s on {target.device}")
    about = ("layer_convention", "last_hidden_state", "dtype", "engine", "engine_dtype")
    result = {"counts": counts, "tokens_per_second": round(rate, 1), "aux_layers": list(meta.aux_layers)}
    return result | {k: getattr(meta, k) for k in about} | {"skipped": skipped}


def extract(
    target: Target, samples: list[Sample], folder: Path, meta: FeatureMeta, config: ExtractConfig
) -> tuple[Store, int]:
    """Store the features of `samples`, going on where a killed run stopped. Returns (store, tokens run now).

    The batches depend on the samples' lengths alone, so a resumed run ends with the same bytes. Raises BadFeatures
    for NaN, infinite or all-zero states, EyasError for token ids that the target does not know.
    """
    known = target.spec.vocab_size
    for sample in samples:
        if sample.token_ids.max() >= known:
            found = f"{sample.token_ids.min()}…{sample.token_ids.max()}"
            raise EyasError(f"sample {sample.id} has token ids {found}, {meta.target} has {known}")
    writer = StoreWriter(folder, meta, config.shard_mb * 1_000_000)
    done = {*writer.ids, *(s["id"] for s in writer.skipped)}
    ran = 0
    with bar(f"extract {folder.name}", sum(len(s.token_ids) for s in samples), "tok") as progress:
        for batch in plan_batches([len(s.token_ids) for s in samples], config.batch_tokens):
            chosen = [samples[i] for i in batch]
            progress.update(sum(len(s.token_ids) for s in chosen))
            if all(s.id in done for s in chosen):
                continue
            # a batch stored by half runs whole again: its states depend on its shape in the last bits
            captured = target.capture([s.token_ids.tolist() for s in chosen], list(meta.aux_layers))
            for sample, states in zip(chosen, captured, strict=True):
                if sample.id in done:
                    continue
                ran += len(sample.token_ids)
                ids, mask = torch.tensor(sample.token_ids), torch.tensor(sample.loss_mask)
                try:
                    writer.add(Features.from_states(sample.id, ids, mask, states.aux, states.last))
                except BadFeatures as e:
                    if config.on_bad == "stop":
                        raise
                    warn(f"{e.message}; skipped")
                    writer.skip(sample.id, e.message)
    store = writer.close()
    if len(store) + len(store.skipped) != len(samples):
        raise EyasError(f"{folder}: {len(store)} of {len(samples)} samples, {len(store.skipped)} skipped")
    return store, ran


def plan_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Indices of each forward pass: windows sorted longest first (what does not fit the memory fails early), cut
    where rows × longest exceeds the budget."""
    batches: list[list[int]] = []
    for start in range(0, len(lengths), WINDOW):
        window = range(start, min(start + WINDOW, len(lengths)))
        width = 0
        for i in sorted(window, key=lambda i: -lengths[i]):
            if not width or (len(batches[-1]) + 1) * width > batch_tokens:
                batches.append([])
                width = lengths[i]
            batches[-1].append(i)
    return batches


def tokenizer_fingerprint(model: Path) -> str:
    """sha256 over the tokenizer files and the chat template of a model folder."""
    return sha256_json({p.name: sha256_file(p) for pattern in TOKENIZER_FILES for p in model.glob(pattern)})
