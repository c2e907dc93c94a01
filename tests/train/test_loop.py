import gc
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from eyas.decode.engine import plain_decode, speculative_decode
from eyas.errors import EyasError
from eyas.features.contract import Features
from eyas.features.store import Store, StoreWriter
from eyas.target.backend import Target
from eyas.train import checkpoint
from eyas.train.batches import pack
from eyas.train.checkpoint import Training
from eyas.train.loop import evaluate, fit, forward, optimiser_step
from eyas.train.metrics import Metrics
from eyas.train.replay import replay


def training_of(model, config):
    return Training(model, config, seed=0)


def names_of(batches):
    return [["x"]] * len(batches)


def empty_store(folder, like: Store) -> Store:
    return StoreWriter(folder, like.meta, 1000).close()


@pytest.fixture(scope="module")
def straight(target, stores, tmp_path_factory):
    """The folder and the result of eight steps without a break."""
    out = tmp_path_factory.mktemp("straight")
    return out, run_script(target, stores, out)


# One process of training, as the stage would run it; the kill tests need a real one.
SCRIPT = """
import json, sys, torch
from pathlib import Path
from eyas.config import DraftConfig, TrainConfig
from eyas.draft import Eagle3DraftConfig, Eagle3DraftModel, init_weights
from eyas.features.contract import Features
from eyas.features.store import Store
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from eyas.train.loop import fit
target, train, heldout, out, config = sys.argv[1:]
spec = TargetSpec.load(target)
weights = TargetWeights(spec)
data = Store(train)
model = Eagle3DraftModel(Eagle3DraftConfig.from_target(spec, DraftConfig(), list(data.meta.aux_layers), 320))
model.load_target(weights)
init_weights(model, weights, spec)
print(json.dumps(fit(model, data, Store(heldout), TrainConfig(**json.loads(config)), Path(out), seed=5)))
"""
CONFIG = {
    **{"ttt_steps": 3, "batch_tokens": 128, "accumulation": 2, "lr": 3e-3, "max_steps": 8, "noise": 0.05},
    **{"eval_every": 3, "checkpoint_every": 2, "dtype": "float32"},
}


def start(target, stores, out):
    arguments = [str(target[0].path), str(stores[0].folder), str(stores[1].folder), str(out), json.dumps(CONFIG)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )


def run_script(target, stores, out):
    printed, _ = start(target, stores, out).communicate(timeout=240)
    return json.loads(printed)


def files(out):
    """All that belongs to the stage's digest."""
    return {
        p.relative_to(out).as_posix(): p.read_bytes()
        for p in out.rglob("*")
        if p.is_file() and "logs" not in p.parts
    }


@pytest.mark.slow
def test_a_run_writes_the_best_draft_checkpoints_and_a_summary(straight):
    out, result = straight
    assert result["counts"]["steps"] == 8
    assert result["counts"]["rows_computed"] < result["counts"]["rows_total"] < result["counts"]["tokens"]
    assert [e["step"] for e in result["evals"]] == [3, 6, 8]
    best = max(result["evals"], key=lambda e: (e["tau"], -e["loss"]))
    assert result["best_step"] == best["step"] and result["tau"] == best["tau"] and result["loss"] == best["loss"]
    assert set(checkpoint.all_steps(out / "checkpoints")) == {6, 8, best["step"]}
    whole = checkpoint.folder_of(out / "checkpoints", best["step"])
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    rows = [json.loads(line) for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "train" in r] == list(range(1, 9))


@pytest.mark.slow
def test_killed_and_resumed_training_ends_with_the_same_bytes_and_rates(straight, target, stores, tmp_path):
    expected, result = straight
    process = start(target, stores, tmp_path)
    while not (tmp_path / "checkpoints" / "step-000004").is_dir():
        assert process.poll() is None
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "model.safetensors").exists()
    again = run_script(target, stores, tmp_path)
    assert files(tmp_path) == files(expected)

    def rows(out):
        parsed = [json.loads(line) for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()]
        return [{k: r["train"][k] for k in ("loss", "lr", "grad_norm", "epoch")} for r in parsed if "train" in r]

    assert rows(tmp_path) == rows(expected)
    assert again["counts"] == result["counts"] and again["evals"] == result["evals"]


@pytest.mark.slow
def test_resume_from_every_step_ends_with_the_same_bytes(
    straight, new_draft, stores, settings, tmp_path, monkeypatch
):
    def train(out, stop=None):
        def write(self, step, kind, row, original=Metrics.write):
            if step == stop and kind == "train":
                raise KeyboardInterrupt
            original(self, step, kind, row)

        with monkeypatch.context() as patch:
            patch.setattr(Metrics, "write", write)
            return fit(new_draft(), *stores, settings(checkpoint_every=1, max_steps=5), out, seed=5)

    train(tmp_path / "whole")
    for stop in (1, 2, 4, 5):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "broken", stop)
    train(tmp_path / "broken")
    assert files(tmp_path / "whole") == files(tmp_path / "broken")


def test_training_again_after_the_last_step_changes_nothing(new_draft, stores, settings, tmp_path):
    config = settings(max_steps=2)
    first = fit(new_draft(), *stores, config, tmp_path)
    before = files(tmp_path)
    second = fit(new_draft(), *stores, config, tmp_path)
    assert files(tmp_path) == before
    assert (
        second["tokens_per_second"] is None
        and second["counts"] == first["counts"]
        and second["tau"] == first["tau"]
    )


@pytest.mark.slow
def test_the_loss_falls_and_tau_rises(new_draft, stores, settings, tmp_path):
    result = fit(new_draft(320), *stores, settings(max_steps=40, noise=0.0, eval_every=10), tmp_path)
    losses = [e["loss"] for e in result["evals"]]
    assert losses[-1] < losses[0]
    assert 1.0 <= result["evals"][0]["tau"] <= result["tau"] <= 4.0
    assert len(result["accept_rate_by_position"]) == 3


def test_loss_and_gradients_do_not_depend_on_how_a_step_is_split(new_draft, stores, settings):
    samples = [stores[0][i] for i in range(7)]
    results = []
    for parts in ([samples], [samples[:1], samples[1:3], samples[3:]], [[s] for s in samples]):
        model = new_draft()
        training = training_of(model, settings(noise=0.0, grad_clip=0.0))
        kept = {}
        training.optimizer.register_step_pre_hook(
            lambda *_, m=model, k=kept: k.update(
                {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}
            )
        )
        row = optimiser_step(training, [pack(p, 1000) for p in parts], 1e-3, names_of(parts))
        results.append((row["loss"], kept))
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        for name, g in gradients.items():
            torch.testing.assert_close(g, results[0][1][name], rtol=1e-4, atol=1e-7)


def test_evaluation_does_not_depend_on_the_batches(new_draft, stores, settings):
    model = new_draft()
    small, large = (evaluate(training_of(model, settings(batch_tokens=b)), stores[1]) for b in (64, 4096))
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-5)
    assert {k: v for k, v in small.items() if "loss" not in k and "overlap" not in k} == {
        k: v for k, v in large.items() if "loss" not in k and "overlap" not in k
    }


def test_every_trainable_tensor_moves_and_frozen_ones_stay(new_draft, stores, settings):
    model = new_draft()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    training = training_of(model, settings())
    for _ in range(2):  # q, k, v start blind to the embedding, so its norm gets no gradient in the first step
        optimiser_step(training, [pack([stores[0][0]], 1000)], 1e-2, [["x"]])
    after = model.state_dict()
    assert {n for n, t in before.items() if not torch.equal(t, after[n])} == training.trained().keys()


def test_a_loss_that_is_not_finite_names_step_and_samples(new_draft, stores, settings, tmp_path):
    model = new_draft()
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    with pytest.raises(EyasError, match=r"step 1: the loss is nan; samples: s\d+") as error:
        fit(model, *stores, settings(), tmp_path)
    named = error.value.message.split(": ")[-1].split(", ")
    assert set(named) < set(stores[0].ids)


def test_a_gradient_that_is_not_finite_names_every_sample_of_the_step(new_draft, stores, settings):
    training = training_of(new_draft(), settings())
    training.model.fc.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(EyasError, match=r"step 1: the gradient norm is (nan|inf); samples: a, b"):
        optimiser_step(training, [pack([stores[0][i]], 1000) for i in (0, 1)], 1e-3, [["a"], ["b"]])


def test_a_micro_batch_without_supervised_rows_adds_nothing(new_draft, stores, settings):
    full = stores[0][0]
    bare = Features(
        "bare",
        full.token_ids,
        torch.zeros_like(full.loss_mask),
        full.aux_hidden_states,
        full.last_hidden_state[:0],
    )
    rows = []
    for batches in ([[full]], [[full], [bare]], [[bare], [full]]):
        training = training_of(new_draft(), settings(noise=0.0))
        rows.append(optimiser_step(training, [pack(b, 1000) for b in batches], 1e-3, names_of(batches)))
    assert rows[0] == rows[1] == rows[2]


def test_without_held_out_samples_the_last_step_is_kept_and_said(new_draft, stores, settings, tmp_path, capsys):
    none = empty_store(tmp_path / "none", stores[0])
    result = fit(new_draft(), stores[0], none, settings(max_steps=3), tmp_path / "out")
    assert result["best_step"] is None and result["tau"] is None
    assert "no held-out samples" in result["warnings"][-1] and "no held-out samples" in capsys.readouterr().err
    last = tmp_path / "out" / "checkpoints" / "step-000003" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == last.read_bytes()


def test_max_steps_other_than_the_epochs_hold_is_said(new_draft, stores, settings, tmp_path):
    result = fit(new_draft(), *stores, settings(max_steps=2), tmp_path)
    assert "max_steps is 2; train.epochs 1 would be" in result["warnings"][0]


def test_cut_samples_are_counted(new_draft, stores, settings, tmp_path):
    result = fit(new_draft(), *stores, settings(max_steps=1, batch_tokens=30), tmp_path)
    cut = int((stores[0].lengths > 30).sum())
    assert any(f"{cut} of {len(stores[0])} samples are longer" in w for w in result["warnings"])


def test_an_empty_store_is_refused(new_draft, stores, settings, tmp_path):
    none = empty_store(tmp_path / "none", stores[0])
    with pytest.raises(EyasError, match="no training samples"):
        fit(new_draft(), none, stores[1], settings(), tmp_path / "out")


@pytest.mark.slow
def test_no_tensor_outlives_its_step(new_draft, stores, settings, tmp_path, monkeypatch):
    alive = {}

    def write(self, step, kind, row):
        assert all(isinstance(v, (int, float, list, type(None))) for v in row.values())
        if step in (5, 30):
            gc.collect()
            alive[step] = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    monkeypatch.setattr(Metrics, "write", write)
    fit(
        new_draft(),
        *stores,
        settings(max_steps=30, eval_every=100, checkpoint_every=100, accumulation=1),
        tmp_path,
    )
    assert alive[30] <= alive[5] + 12  # the next batch may or may not be loaded yet


@pytest.mark.slow
def test_bfloat16_products_train_float32_weights(new_draft, stores, settings, tmp_path):
    result = fit(new_draft(), *stores, settings(max_steps=3, dtype="bfloat16", eval_every=3), tmp_path)
    exact = fit(new_draft(), *stores, settings(max_steps=3, eval_every=3), tmp_path / "exact")
    assert result["loss"] == pytest.approx(exact["loss"], rel=0.05)
    from safetensors.torch import load_file

    kept = load_file(tmp_path / "model.safetensors")
    assert kept["fc.weight"].dtype == torch.float32
    assert not torch.equal(kept["fc.weight"], kept["fc.weight"].bfloat16().float())


@pytest.mark.slow
def test_replay_is_what_the_engine_accepts(target, new_draft, stores, settings):
    spec, _ = target
    model = new_draft(320)
    training = training_of(model, settings(noise=0.0))
    seen = pack([stores[1][i] for i in range(len(stores[1]))], 2000)
    for _ in range(60):  # learns the very answers, so that chains of every length are accepted
        optimiser_step(training, [seen], 5e-3, [["x"]])
    engine = Target.load(spec, "float32", "cpu", "sdpa", False)
    model.eval()
    accepted = 0
    for i in range(len(stores[1])):
        ids = stores[1][i].token_ids[~stores[1][i].loss_mask].tolist()
        answer = plain_decode(engine, ids, 24).token_ids
        captured = engine.capture([ids + answer], list(model.config.aux_layers))[0]
        mask = torch.arange(len(ids + answer)) >= len(ids)
        exact = Features("x", torch.tensor(ids + answer), mask, captured.aux.float(), captured.last.float()[mask])
        batch = pack([exact], 1000)
        with torch.no_grad():
            guesses = forward(training, batch).draft_tokens.numpy()
        replayed = replay(guesses, batch.input_ids.numpy(), batch.supervised.numpy(), batch.doc_end.numpy())
        rounds = speculative_decode(engine, model, ids, 24, 3).rounds
        assert replayed.rounds == len(rounds)
        assert replayed.accepted.tolist() == [sum(m > k for m in rounds) for k in range(3)]
        accepted += sum(rounds)
    assert accepted > 5
