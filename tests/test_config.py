"""The YAML, its errors, and the flags that are its keys."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eyas.cli import Run, resolve
from eyas.config import RunConfig, keys
from eyas.errors import UsageError


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_every_way_to_write_a_learning_rate_reads_as_a_number(tmp_path, text):
    assert RunConfig.load(write(tmp_path, f"train: {{lr: {text}}}")).train.lr == 0.0001


def test_a_word_for_a_number_names_key_and_value(tmp_path):
    with pytest.raises(UsageError, match=r"train\.lr: expected a number, got 'fast'"):
        RunConfig.load(write(tmp_path, "train: {lr: fast}"))


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("lr: 1e-3", "'lr'", "train.lr"),
        ("train: {weigth_decay: 0.1}", "'train.weigth_decay'", "train.weight_decay"),
        ("train: {num-epochs: 2}", "'train.num-epochs'", "train.epochs"),
        ("extract: {batch_token: 2}", "'extract.batch_token'", "extract.batch_tokens"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(tmp_path, text, key, near):
    with pytest.raises(UsageError) as error:
        RunConfig.load(write(tmp_path, text))
    assert key in str(error.value)
    assert near in str(error.value)


def test_broken_yaml_names_line_and_column(tmp_path):
    with pytest.raises(UsageError, match="line 2, column"):
        RunConfig.load(write(tmp_path, "train: {lr: 1\n  epochs: [}"))


def test_explicit_zero_stays_zero(tmp_path):
    config = RunConfig.load(write(tmp_path, "train: {noise: 0, warmup: 0, grad_clip: 0.0}"))
    assert (config.train.noise, config.train.warmup, config.train.grad_clip) == (0, 0, 0)


def test_the_resolved_config_reads_back_unchanged(tmp_path):
    config = RunConfig.load(write(tmp_path, "train: {lr: 1e-4, betas: [0.9, 0.98]}\ndata: {sources: [a.jsonl]}"))
    assert RunConfig.load(write(tmp_path, config.to_yaml())) == config


@given(lr=st.floats(1e-8, 1.0), epochs=st.integers(1, 10**6), heldout=st.floats(0, 0.99))
def test_numbers_survive_the_round_trip_exactly(lr, epochs, heldout):
    config = RunConfig.parse({"train": {"lr": lr, "epochs": epochs}, "data": {"heldout": heldout}})
    assert RunConfig.parse(yaml.safe_load(config.to_yaml())) == config


def test_flag_beats_file_beats_default(tmp_path):
    path = write(tmp_path, "train: {lr: 2e-4, epochs: 3}")
    command = Run(config=path, set=["train.epochs=4"])
    config = resolve(command, ["--train.lr", "5e-4"])
    assert (config.train.lr, config.train.epochs, config.train.ttt_steps) == (5e-4, 4, 7)


def test_an_unknown_flag_names_the_nearest_key(tmp_path):
    with pytest.raises(UsageError, match=r"train\.epochs"):
        resolve(Run(config=write(tmp_path, "seed: 1")), ["--train.epoch", "2"])


def test_every_key_is_documented():
    assert [k for k, info in keys().items() if not info.description] == []


def test_a_url_is_no_run_folder(tmp_path):
    with pytest.raises(UsageError, match="local folder"):
        RunConfig.load(write(tmp_path, "run_dir: s3://bucket/run"))
