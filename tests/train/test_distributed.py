"""Training in several processes: the numbers of one process, whatever their number, and no rank left waiting."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.torch import load_file

from eyas.errors import EyasError
from eyas.features.contract import Features
from eyas.features.store import StoreWriter
from eyas.train import checkpoint, distributed
from eyas.train.loop import plan_run
from tests.train.test_loop import CONFIG, SCRIPT

RANKED = SCRIPT.replace(
    "import json, sys, torch", "import json, sys, torch\nfrom eyas.train import distributed\ndistributed.start()"
)


def launch(count, target, stores, out, **settings):
    """The script of `test_loop` in `count` processes, as torchrun starts them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    config = json.dumps(CONFIG | settings)
    arguments = [str(target[0].path), str(stores[0].folder), str(stores[1].folder), str(out), config]
    base = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANKED, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=base | {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(count)},
        )
        for r in range(count)
    ]


def train(*arguments, **settings):
    printed = [p.communicate(timeout=240) for p in launch(*arguments, **settings)]
    return [json.loads(out) if out else err for out, err in printed]


def losses(out):
    rows = [json.loads(line) for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [row["train"]["loss"] for row in rows if "train" in row]


def interrupt(processes, out, steps):
    """SIGTERM to rank 0 after so many steps; what each rank then prints to stderr."""
    log = out / "logs" / "metrics.jsonl"
    while not (log.is_file() and log.read_text().count("\n") >= steps):
        assert processes[0].poll() is None, processes[0].communicate()[1]
        time.sleep(0.01)
    processes[0].send_signal(signal.SIGTERM)
    return [p.communicate(timeout=60)[1] for p in processes]


@pytest.fixture(scope="module")
def alone(target, stores, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    (result,) = train(1, target, stores, out)
    return out, result


@pytest.mark.slow
def test_two_processes_learn_what_one_does(alone, target, stores, tmp_path):
    expected, result = alone
    both = train(2, target, stores, tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(expected), rel=1e-5)
    for other in both:  # every rank knows the sums of all
        assert other["counts"] == result["counts"]
        assert [e["tau"] for e in other["evals"]] == pytest.approx([e["tau"] for e in result["evals"]], rel=0.02)
    weights, whole = load_file(tmp_path / "model.safetensors"), load_file(expected / "model.safetensors")
    for name in whole:
        np.testing.assert_allclose(weights[name].numpy(), whole[name].numpy(), rtol=0, atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_training_goes_on_with_another_number_of_processes(target, stores, tmp_path):
    settings = {"max_steps": 30, "eval_every": 100, "checkpoint_every": 100, "lr": 1e-3}
    train(1, target, stores, tmp_path / "whole", **settings)
    interrupt(launch(2, target, stores, tmp_path / "broken", **settings), tmp_path / "broken", steps=5)
    assert len(losses(tmp_path / "broken")) < 30
    train(1, target, stores, tmp_path / "broken", **settings)
    assert losses(tmp_path / "broken") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


@pytest.mark.slow
def test_a_rank_with_nothing_supervised_neither_waits_nor_makes_nan(target, stores, tmp_path):
    writer = StoreWriter(tmp_path / "store", stores[0].meta, 100_000)
    for i in range(4):
        f = stores[0][i]
        bare = Features(f.id, f.token_ids, f.loss_mask & False, f.aux_hidden_states, f.last_hidden_state[:0])
        writer.add(bare if i else f)
    data = writer.close()
    settings = {"max_steps": 3, "batch_tokens": 60, "accumulation": 4, "noise": 0.0}
    for count in (1, 2):
        train(count, target, (data, stores[1]), tmp_path / str(count), **settings)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    assert np.isfinite(losses(tmp_path / "2")).all()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_sigterm_keeps_the_step_and_says_so(count, target, stores, tmp_path):
    processes = launch(count, target, stores, tmp_path, max_steps=400, eval_every=500, checkpoint_every=500)
    errors = interrupt(processes, tmp_path, steps=3)
    (step,) = checkpoint.all_steps(tmp_path / "checkpoints")
    assert all(f"stopped by SIGTERM after step {step}, which is kept" in e for e in errors)
    assert len(losses(tmp_path)) == step


def test_more_processes_than_micro_batches_are_refused(stores, settings, monkeypatch):
    monkeypatch.setattr(distributed, "size", lambda: 4)
    with pytest.raises(EyasError, match="4 processes share 2 micro-batches of an optimiser step") as error:
        plan_run(*stores, settings(), 0)
    assert "set train.accumulation to a multiple of 4" in error.value.hint


def test_checks_before_training_are_made_by_one_rank_for_itself(monkeypatch):
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "get_rank", lambda: 0)
    assert distributed.size() == 2
    with distributed.alone():
        assert distributed.size() == 1 and distributed.tell("mine") == "mine"
    assert distributed.size() == 2
