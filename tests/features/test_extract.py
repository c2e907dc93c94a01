"""Extraction on a tiny real target: right states, in the store, whatever the batches, whenever it was killed."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.config import ExtractConfig, RunConfig
from eyas.data.samples import Sample, write_samples
from eyas.errors import EyasError
from eyas.features.contract import BadFeatures, FeatureMeta
from eyas.features.extract import extract, plan_batches, run, tokenizer_fingerprint
from eyas.features.store import Store
from eyas.files import write_json
from eyas.pipeline import Context
from eyas.target.weights import TargetWeights

AUX = [1, 3, 5]


def samples_of(lengths: list[int], split: str = "train") -> list[Sample]:
    made = []
    for i, length in enumerate(lengths):
        random = np.random.default_rng(i)
        ids = random.integers(3, 300, length).astype(np.int32)
        mask = np.arange(length) >= length // 2
        made.append(Sample(f"{split}-{i}", split, None, ids, mask, ids[:1]))
    return made


@pytest.fixture
def meta(target) -> FeatureMeta:
    return FeatureMeta("tiny", target.spec.fingerprint, "h", "k", tuple(AUX), 32, "transformers", "float32")


def by_id(store: Store) -> dict:
    return {f.id: f for f in store}


def test_states_are_the_targets_own_and_rows_are_those_of_supervised_tokens(target, meta, tmp_path):
    samples = samples_of([9, 5, 12])
    store, ran = extract(target, samples, tmp_path, meta, ExtractConfig(batch_tokens=1000))
    assert ran == 26
    for sample in samples:
        features = by_id(store)[sample.id]
        ids = torch.tensor(sample.token_ids).long()[None]
        with torch.inference_mode():
            out = target.model(ids, output_hidden_states=True)
        wanted = torch.stack([out.hidden_states[i][0] for i in AUX], 1).bfloat16()
        torch.testing.assert_close(features.aux_hidden_states, wanted, rtol=1e-2, atol=1e-2)
        # before the final norm: norm and head of the target turn it into the target's logits
        logits = target.model.lm_head(target.model.model.norm(features.last_hidden_state.float()))
        torch.testing.assert_close(logits, out.logits[0, torch.tensor(sample.loss_mask)], rtol=0.05, atol=0.05)
        assert features.token_ids.tolist() == sample.token_ids.tolist()
        assert features.loss_mask.tolist() == sample.loss_mask.tolist()


def test_one_batch_and_one_by_one_give_the_same_states(target, meta, tmp_path):
    samples = samples_of([3, 5, 4])
    together, _ = extract(target, samples, tmp_path / "a", meta, ExtractConfig(batch_tokens=100))
    alone, _ = extract(target, samples, tmp_path / "b", meta, ExtractConfig(batch_tokens=1))
    assert sorted(together.lengths.tolist()) == [3, 4, 5]
    for id, features in by_id(alone).items():
        other = by_id(together)[id]
        assert torch.equal(other.token_ids, features.token_ids)
        torch.testing.assert_close(other.aux_hidden_states, features.aux_hidden_states, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(other.last_hidden_state, features.last_hidden_state, rtol=1e-2, atol=1e-3)


def test_every_sample_comes_out_once(target, meta, tmp_path):
    samples = samples_of([2 + i % 7 for i in range(40)])
    store, _ = extract(target, samples, tmp_path, meta, ExtractConfig(batch_tokens=32))
    assert len(store) == 40 and sorted(store.ids) == sorted(s.id for s in samples)


def test_a_token_the_target_does_not_know_is_named(target, meta, tmp_path):
    sample = samples_of([4])[0]
    foreign = replace(sample, token_ids=np.array([1, 2, 320, 3], np.int32))
    with pytest.raises(EyasError, match=r"sample train-0 has token ids 1…320, tiny has 320"):
        extract(target, [foreign], tmp_path, meta, ExtractConfig())


@pytest.fixture
def overflowing(target):
    """The target, with an infinity at the second token of every sample that starts with token 7."""

    def spoil(_module, args, kwargs):
        hidden = args[0].clone()
        hidden[starts_with_7, 1] = float("inf")
        return (hidden, *args[1:]), kwargs

    starts_with_7 = torch.zeros(1, dtype=torch.bool)

    def look(_module, _args, kwargs):
        nonlocal starts_with_7
        starts_with_7 = kwargs["input_ids"][:, 0] == 7

    model = target.model.model
    handles = [model.register_forward_pre_hook(look, with_kwargs=True)]
    handles.append(model.layers[3].register_forward_pre_hook(spoil, with_kwargs=True))
    yield target
    for handle in handles:
        handle.remove()


def with_one_bad(lengths: list[int], at: int) -> list[Sample]:
    samples = samples_of(lengths)
    for sample in samples:
        sample.token_ids[0] = 7 if sample is samples[at] else 8
    return samples


def test_an_overflow_stops_and_names_sample_layer_and_first_token(overflowing, meta, tmp_path):
    with pytest.raises(BadFeatures, match=r"sample train-2: .*layer 3 at token 1 is infinite(.|\n)*float16"):
        extract(overflowing, with_one_bad([5, 5, 5, 5], 2), tmp_path, meta, ExtractConfig())


def test_an_overflow_can_be_skipped_and_is_counted(overflowing, meta, tmp_path):
    config = ExtractConfig(on_bad="skip")
    store, _ = extract(overflowing, with_one_bad([5, 6, 5, 5], 2), tmp_path, meta, config)
    assert len(store) == 3 and "train-2" not in store.ids
    assert [s["id"] for s in store.skipped] == ["train-2"] and "layer 3" in store.skipped[0]["reason"]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 100))
def test_batches_hold_every_sample_once_and_keep_the_budget(lengths, budget):
    batches = plan_batches(lengths, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
        assert max(lengths[i] for i in batch) == lengths[batch[0]]
    assert not lengths or max(lengths) == lengths[batches[0][0]]  # the hardest first


def test_tokenizer_fingerprint_follows_the_template(target, tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    for file in target.spec.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(target.spec.path)
    (copy / "config.json").write_text("{}")
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(target.spec.path)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("user", "User") + " ")
    assert tokenizer_fingerprint(copy) != tokenizer_fingerprint(target.spec.path)


def make_context(
    folder: Path, target, lengths: list[int], aux_layers: list[int] = AUX, batch_tokens: int = 64
) -> Context:
    """A run folder in which prepare is done."""
    config = RunConfig.parse(
        {
            "run_dir": str(folder),
            "device": "cpu",
            "target": {"model": str(target.spec.path)},
            "extract": {"aux_layers": aux_layers, "batch_tokens": batch_tokens, "shard_mb": 1},
        }
    )
    samples = [*samples_of(lengths), *samples_of([6, 8], "heldout")]
    facts = {"target": target.spec.name, "target_fingerprint": target.spec.fingerprint}
    (folder / "prepare").mkdir(parents=True)
    write_samples(folder / "prepare" / "samples.parquet", samples, facts)
    write_json(folder / "prepare" / "manifest.json", {})
    return Context(config, folder, folder / "extract.partial")


def test_the_stage_writes_two_stores_and_says_what_is_in_them(target, tmp_path):
    ctx = make_context(tmp_path, target, [5, 9, 7])
    result = run(ctx)
    counts = result["counts"]
    assert {k: counts[k] for k in ("samples", "train", "heldout", "tokens", "skipped")} == {
        "samples": 5, "train": 3, "heldout": 2, "tokens": 35, "skipped": 0,
    }  # fmt: skip
    assert counts["supervised"] == 3 + 5 + 4 + 3 + 4
    assert result["last_hidden_state"] == "pre_final_norm" and result["layer_convention"] == "boundary"
    assert result["tokens_per_second"] > 0
    train, heldout = (Store(ctx.out / "features" / split) for split in ("train", "heldout"))
    assert counts["bytes"] == sum(p.stat().st_size for p in ctx.out.rglob("*.safetensors"))
    assert all(i.startswith("heldout") for i in heldout.ids)
    train.check(
        target_fingerprint=target.spec.fingerprint,
        head_fingerprint=TargetWeights(target.spec).fingerprint(),
        tokenizer_fingerprint=tokenizer_fingerprint(target.spec.path),
        aux_layers=AUX,
        engine_dtype="float32",
    )


CHILD = """
import sys
from pathlib import Path
from eyas.config import RunConfig
from eyas.features.extract import run
from eyas.pipeline import Context
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
run(Context(RunConfig.load(folder / "run.yaml"), folder, out))
"""


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bytes(target, tmp_path):
    """7 MB of features in 1 MB shards; the child is killed as soon as three are there."""
    ctx = make_context(tmp_path, target, [40 + 20 * (i % 10) for i in range(150)], [1, 2, 3, 4, 5], 1000)
    (tmp_path / "run.yaml").write_text(ctx.config.to_yaml())

    def child(out: Path) -> subprocess.Popen:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(out)], env=environment, stderr=subprocess.DEVNULL
        )

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert child(whole).wait() == 0
    assert len(Store(whole / "features" / "train").shards) > 5
    process = child(parts)
    while process.poll() is None and len(list(parts.rglob("shard-*"))) < 3:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(list(parts.rglob("shard-*"))) < len(list(whole.rglob("shard-*")))
    assert child(parts).wait() == 0
    files = {p.relative_to(whole): p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    assert {p.relative_to(parts): p.read_bytes() for p in parts.rglob("*") if p.is_file()} == files
