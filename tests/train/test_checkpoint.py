import pytest
import torch
from safetensors.torch import load_file

from eyas.draft import load_draft
from eyas.errors import EyasError
from eyas.train import checkpoint
from eyas.train.checkpoint import Training


@pytest.fixture
def new_training(new_draft, settings):
    def make(draft=None, seed=0, **values):
        return Training(draft or new_draft(), settings(**values), seed)

    return make


@pytest.fixture
def trained(new_training):
    """After one made-up step."""
    training = new_training()
    for p in training.trained().values():
        p.grad = torch.full_like(p, 0.1)
    training.optimizer.step()
    return training


def save(root, training, step, **progress):
    for name, value in {"step": step, **progress}.items():
        setattr(training, name, value)
    checkpoint.save(root, training, {"target": "tiny"})


def test_a_checkpoint_holds_the_draft_its_moments_and_little_else(tmp_path, trained, target):
    save(tmp_path, trained, 1)
    folder = tmp_path / "step-000001"
    assert load_file(folder / "model.safetensors").keys() == trained.model.state_dict().keys()
    moments = load_file(folder / "optimizer.safetensors").keys()
    assert moments == {f"{kind}.{n}" for n in trained.trained() for kind in ("exp_avg", "exp_avg_sq")}
    parameters = sum(p.numel() for p in trained.model.parameters())
    assert sum(f.stat().st_size for f in folder.iterdir()) < parameters * 4 * 3 + 40_000
    assert load_draft(folder, target[1]).config == trained.model.config


def test_everything_comes_back(tmp_path, trained, new_training):
    evals = [{"step": 2, "tau": 1.5, "loss": 3.0}]
    save(tmp_path, trained, 2, evals=evals, best=2, counts={"tokens": 5})
    other = new_training()
    checkpoint.resume(tmp_path, other)
    assert (other.step, other.evals, other.best, other.counts) == (2, evals, 2, {"tokens": 5})
    for name, a in trained.trained().items():
        b = other.trained()[name]
        assert torch.equal(a, b), name
        assert trained.optimizer.state[a].keys() == other.optimizer.state[b].keys()
        assert all(
            torch.equal(v, other.optimizer.state[b][k])
            for k, v in trained.optimizer.state[a].items()
            if k != "step"
        )
        assert other.optimizer.state[b]["step"].item() == 2.0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        (lambda f: (f / "state.json").write_text(""), "state.json cannot be read"),
        (lambda f: (f / "optimizer.safetensors").write_bytes(b""), "optimizer.safetensors has 0 bytes, expected"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    ],
)
def test_a_broken_newest_checkpoint_is_named_and_the_older_one_used(tmp_path, trained, capsys, damage, reason):
    for step in (3, 7):
        save(tmp_path, trained, step)
    damage(tmp_path / "step-000007")
    (tmp_path / ".step-000009.tmp").mkdir()
    checkpoint.resume(tmp_path, trained)
    assert trained.step == 3
    said = capsys.readouterr().err
    assert "step-000007" in said and reason in said and "step-000003" in said
    assert [f.name for f in tmp_path.iterdir()] == ["step-000003"]


def test_nothing_whole_means_the_first_step(tmp_path, trained, new_training, capsys):
    save(tmp_path, trained, 3)
    (tmp_path / "step-000003" / "state.json").unlink()
    fresh = new_training()
    checkpoint.resume(tmp_path, fresh)
    assert fresh.step == 0
    assert "starting afresh" in capsys.readouterr().err


def test_other_settings_are_refused_but_training_longer_is_not(tmp_path, trained, new_training):
    save(tmp_path, trained, 3)
    with pytest.raises(EyasError, match=r"lr 0\.003 -> 0\.5"):
        checkpoint.resume(tmp_path, new_training(lr=0.5))
    with pytest.raises(EyasError, match="seed 0 -> 1"):
        checkpoint.resume(tmp_path, new_training(seed=1))
    longer = new_training(max_steps=20)
    checkpoint.resume(tmp_path, longer)
    assert longer.step == 3


def test_a_draft_of_another_shape_is_refused(tmp_path, trained, new_training, new_draft):
    save(tmp_path, trained, 3)
    with pytest.raises(EyasError, match="intermediate_size 64 -> 48"):
        checkpoint.resume(tmp_path, new_training(new_draft(intermediate_size=48)))


def test_a_missing_best_checkpoint_is_said(tmp_path, trained, new_training, capsys):
    save(tmp_path, trained, 3, best=2, evals=[{"step": 2, "tau": 1.5, "loss": 3.0}])
    training = new_training()
    checkpoint.resume(tmp_path, training)
    assert training.best is None
    assert "step 2, is gone" in capsys.readouterr().err


def test_the_newest_and_the_best_are_kept(tmp_path, trained):
    for step in (2, 4, 6, 999_999, 1_000_000):
        save(tmp_path, trained, step, best=4 if step >= 4 else None)
    assert checkpoint.all_steps(tmp_path) == [4, 999_999, 1_000_000]


def test_best_is_the_highest_tau_then_the_lower_loss_and_stays_best_after_a_worse_one(trained):
    for step, tau, loss, best in [
        (1, 1.5, 1.0, 1),
        (2, 1.4, 0.5, 1),
        (3, 1.5, 1.0, 1),
        (4, 1.5, 0.9, 4),
        (5, 1.6, 2.0, 5),
    ]:
        trained.step = step
        trained.judge({"tau": tau, "loss": loss})
        assert trained.best == best


def test_without_any_round_the_lower_loss_is_best(trained):
    trained.judge({"tau": None, "loss": 2.0})
    trained.step = 2
    trained.judge({"tau": None, "loss": 1.0})
    assert trained.best == 2


def test_too_little_disk_is_refused_with_both_numbers(tmp_path, trained, monkeypatch):
    usage = type("Usage", (), {"free": 1_000})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EyasError, match=r"need 0\.\d\d GB more, 0\.00 GB are free"):
        checkpoint.check_disk(tmp_path / "checkpoints", trained)
