import json

import pytest

from eyas.train.metrics import Metrics


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_plain_json_lines_and_scalars_on_the_board(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path)
    metrics.write(1, "train", {"loss": 2.5, "loss_by_step": [2.0, 3.0]})
    metrics.write(1, "eval", {"tau": None, "rate": [0.5, None]})
    metrics.close()
    assert rows(tmp_path) == [
        {"step": 1, "train": {"loss": 2.5, "loss_by_step": [2.0, 3.0]}},
        {"step": 1, "eval": {"tau": None, "rate": [0.5, None]}},
    ]
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == [
        "eval/rate/0",
        "train/loss",
        "train/loss_by_step/0",
        "train/loss_by_step/1",
    ]


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    metrics = Metrics(tmp_path)
    for step in range(1, 6):
        metrics.write(step, "train", {"loss": 1.0 * step})
    metrics.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 6, "tra')  # cut by a kill
    resumed = Metrics(tmp_path, step=3)
    resumed.write(4, "train", {"loss": 0.5})
    resumed.close()
    assert [(r["step"], r["train"]["loss"]) for r in rows(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5)]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    first = Metrics(tmp_path)
    first.write(1, "train", {"loss": 1.0})
    first.close()
    Metrics(tmp_path).close()
    assert rows(tmp_path) == []


def test_nan_is_refused(tmp_path):
    metrics = Metrics(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        metrics.write(1, "train", {"loss": float("nan")})
    metrics.close()
