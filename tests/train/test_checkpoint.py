import json

import pytest
import torch
from safetensors.torch import load_file

from eyas.draft import load_draft
from eyas.errors import EyasError
from eyas.train import checkpoint
from eyas.train.checkpoint import Progress
from eyas.train.optim import adamw


@pytest.fixture
def trained(new_draft, settings):
    """(model, optimizer, noise generator, config) after one made-up step."""
    model, config = new_draft(), settings()
    optimizer = adamw(model, config)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    return model, optimizer, torch.Generator().manual_seed(0), config


def save(root, trained, step, **progress):
    model, optimizer, noise, config = trained
    state = {"epoch": 0, "total_steps": 9, "seed": 0, "config": config.model_dump(mode="json")}
    checkpoint.save(root, model, optimizer, noise, Progress(step=step, **progress), state)


def test_a_checkpoint_holds_the_draft_its_moments_and_little_else(tmp_path, trained, target):
    model, *_ = trained
    save(tmp_path, trained, 1)
    folder = tmp_path / "step-000001"
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    moments = load_file(folder / "optimizer.safetensors").keys() - {"noise_rng"}
    assert moments == {f"{kind}.{n}" for n in trainable for kind in ("exp_avg", "exp_avg_sq")}
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(f.stat().st_size for f in folder.iterdir()) < parameters * 4 * 3 + 40_000
    assert load_draft(folder, target[1]).config == model.config


def test_everything_comes_back(tmp_path, trained, new_draft, settings):
    model, optimizer, noise, config = trained
    torch.randn(7, generator=noise)
    evals = [{"step": 2, "tau": 1.5, "loss": 3.0}]
    save(tmp_path, trained, 2, evals=evals, best=2, counts={"tokens": 5})
    other = new_draft()
    back, fresh = adamw(other, config), torch.Generator().manual_seed(9)
    progress = checkpoint.resume(tmp_path, other, back, fresh, config, seed=0)
    assert (progress.step, progress.evals, progress.best, progress.counts) == (2, evals, 2, {"tokens": 5})
    assert torch.equal(torch.randn(3, generator=fresh), torch.randn(3, generator=noise))
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.requires_grad:
            assert torch.equal(optimizer.state[a]["exp_avg_sq"], back.state[b]["exp_avg_sq"])
            assert back.state[b]["step"].item() == 2.0


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
    model, optimizer, noise, config = trained
    assert checkpoint.resume(tmp_path, model, optimizer, noise, config, seed=0).step == 3
    said = capsys.readouterr().err
    assert "step-000007" in said and reason in said and "step-000003" in said
    assert [f.name for f in tmp_path.iterdir()] == ["step-000003"]


def test_nothing_whole_means_the_first_step(tmp_path, trained, capsys):
    model, optimizer, noise, config = trained
    save(tmp_path, trained, 3)
    (tmp_path / "step-000003" / "state.json").unlink()
    assert checkpoint.resume(tmp_path, model, optimizer, noise, config, seed=0).step == 0
    assert "starting from the first step" in capsys.readouterr().err


def test_another_config_or_seed_is_refused_but_training_longer_is_not(tmp_path, trained):
    model, optimizer, noise, config = trained
    save(tmp_path, trained, 3)
    with pytest.raises(EyasError, match=r"lr 0\.003 -> 0\.5"):
        checkpoint.resume(tmp_path, model, optimizer, noise, config.model_copy(update={"lr": 0.5}), seed=0)
    with pytest.raises(EyasError, match="seed 0 -> 1"):
        checkpoint.resume(tmp_path, model, optimizer, noise, config, seed=1)
    longer = config.model_copy(update={"max_steps": 20})
    assert checkpoint.resume(tmp_path, model, optimizer, noise, longer, seed=0).step == 3


def test_missing_moments_are_named(tmp_path, trained, new_draft):
    model, optimizer, noise, config = trained
    save(tmp_path, trained, 3)
    wider = new_draft(intermediate_size=48)
    with pytest.raises((EyasError, RuntimeError), match="size mismatch|expected shape"):
        checkpoint.resume(tmp_path, wider, adamw(wider, config), noise, config, seed=0)


def test_a_missing_best_checkpoint_is_said(tmp_path, trained, capsys):
    model, optimizer, noise, config = trained
    save(tmp_path, trained, 3, best=2, evals=[{"step": 2, "tau": 1.5, "loss": 3.0}])
    assert checkpoint.resume(tmp_path, model, optimizer, noise, config, seed=0).best is None
    assert "step 2, is gone" in capsys.readouterr().err


def test_a_random_state_of_another_device_is_ignored_with_a_warning(tmp_path, trained, capsys):
    from safetensors.torch import save_file

    model, optimizer, noise, config = trained
    save(tmp_path, trained, 3)
    path = tmp_path / "step-000003" / "optimizer.safetensors"
    save_file(load_file(path) | {"noise_rng": torch.zeros(16, dtype=torch.uint8)}, path)
    state = json.loads((path.parent / "state.json").read_text())
    state["files"][path.name] = path.stat().st_size
    (path.parent / "state.json").write_text(json.dumps(state))
    assert checkpoint.resume(tmp_path, model, optimizer, noise, config, seed=0).step == 3
    assert "random state is ignored" in capsys.readouterr().err


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in (2, 4, 6, 8, 1_000_000):
        checkpoint.folder_of(tmp_path, step).mkdir()
    checkpoint.prune(tmp_path, keep=2, best=4)
    assert checkpoint.all_steps(tmp_path) == [4, 8, 1_000_000]


def test_best_is_the_highest_tau_then_the_lower_loss_and_stays_best_after_a_worse_one():
    progress = Progress(step=1)
    for step, tau, loss, best in [
        (1, 1.5, 1.0, 1),
        (2, 1.4, 0.5, 1),
        (3, 1.5, 1.0, 1),
        (4, 1.5, 0.9, 4),
        (5, 1.6, 2.0, 5),
    ]:
        progress.step = step
        progress.judge({"tau": tau, "loss": loss})
        assert progress.best == best


def test_without_any_round_the_lower_loss_is_best():
    progress = Progress(step=1)
    progress.judge({"tau": None, "loss": 2.0})
    progress.step = 2
    progress.judge({"tau": None, "loss": 1.0})
    assert progress.best == 2


def test_too_little_disk_is_refused_with_both_numbers(tmp_path, new_draft, monkeypatch):
    usage = type("Usage", (), {"free": 1_000})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EyasError, match=r"need 0\.\d\d GB .* 0\.00 GB are free"):
        checkpoint.check_disk(tmp_path / "checkpoints", new_draft(), keep=2)
