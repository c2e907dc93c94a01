"""What is said beside the faults: figures, what is skipped and why, the memory that training takes."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas.preflight import model
from eyas.preflight.finding import Subject
from eyas.preflight.masks import edges
from eyas.preflight.runner import run_preflight
from eyas.train import checkpoint
from eyas.train.batches import pack
from tests.preflight.faults import head, setting, store
from tests.preflight.healthy import CHECKED, copy_of


def errors(result) -> list[str]:
    return [f["message"] for s in result["stages"] for f in s["findings"] if f["level"] == "error"]


def messages(result, stage: str) -> str:
    return "\n".join(f["message"] for s in result["stages"] if s["name"] == stage for f in s["findings"])


def status(result) -> dict[str, str]:
    return {s["name"]: s["status"] for s in result["stages"]}


def test_without_a_draft_vocabulary_model_and_dry_run_are_skipped(healthy, tmp_path):
    config = copy_of(healthy, tmp_path / "run")
    (Path(config.run_dir) / "vocab" / "manifest.json").unlink()
    result = run_preflight(config, CHECKED)
    assert {status(result)[s] for s in ("vocab", "model", "dry_run", "deploy")} == {"skipped"}
    assert "stage vocab has not run" in messages(result, "vocab")
    assert "skipped: fresh was skipped" in messages(result, "dry_run")
    assert result["ok"]


def test_what_hangs_on_unfit_features_is_skipped(healthy, tmp_path):
    config = copy_of(healthy, tmp_path / "run")
    head(target_fingerprint="0" * 64)(config)
    result = run_preflight(config, CHECKED)
    assert not result["ok"] and "target_fingerprint" in errors(result)[0]
    assert status(result)["alignment"] == status(result)["dry_run"] == "skipped"
    assert "contract was skipped" in messages(result, "alignment")


def test_a_massive_channel_is_reported_and_no_error(healthy, tmp_path):
    def swell(f):
        f.aux_hidden_states[0, 2, 7] = 1e5
        return f

    config = copy_of(healthy, tmp_path / "run")
    store(swell)(config)
    result = run_preflight(config, ["features"], ["recomputed"])
    found = {f["message"]: f["evidence"] for f in result["stages"][0]["findings"] if f["check"] == "states"}
    name = next(n for n in found if n.startswith("aux layer 5"))
    assert found[name]["massive"] == [7] and errors(result) == []


def test_features_that_shrink_from_layer_to_layer_are_a_warning(healthy, tmp_path):
    config = copy_of(healthy, tmp_path / "run")
    store(lambda f: replace(f, aux_hidden_states=f.aux_hidden_states.flip(1).contiguous()))(config)
    result = run_preflight(config, ["features"], ["recomputed"])
    assert "the aux states shrink from layer to layer" in messages(result, "features") and result["ok"]
    assert not run_preflight(config, ["features"], ["recomputed"], strict=True)["ok"]


def test_a_large_target_is_not_run_and_that_is_said(healthy, monkeypatch):
    monkeypatch.setattr("eyas.preflight.identity.LARGEST", 1000)
    result = run_preflight(healthy, ["features"])
    assert "not recomputed, the layers are taken as they are said to be" in messages(result, "features")


def test_a_sample_is_shown_token_by_token(healthy):
    shown = [
        f["evidence"]["tokens"]
        for f in run_preflight(healthy, ["data"])["stages"][0]["findings"]
        if "tokens" in f["evidence"]
    ]
    assert shown[0][0] == ["<|im_start|>", 0] and shown[0][-1] == ["<|im_end|>", 1]


def test_guesses_are_kept_as_evidence(healthy, tmp_path):
    config = copy_of(healthy, tmp_path / "run")
    store(lambda f: replace(f, last_hidden_state=f.last_hidden_state.flip(-1).contiguous()))(config)
    result = run_preflight(config, ["features", "alignment"], ["recomputed"])
    (guesses,) = [
        f["evidence"]["hypotheses"]
        for s in result["stages"]
        for f in s["findings"]
        if "hypotheses" in f["evidence"]
    ]
    assert {"as stored", "row p is token p-1's", "row p is token p+1's"} < guesses.keys()
    assert any(name.startswith("the final norm already applied") for name in guesses)
    assert any("parts of the hidden dimension" in name for name in guesses)


@pytest.mark.parametrize(
    ("by", "level", "said"),
    [(0, "info", "4 of 4 answers"), (1, "error", "shifted right by one"), (-1, "error", "shifted left by one")],
)
def test_mask_edges_tell_a_shift_from_ids_alone(by, level, said):
    ids = torch.tensor([5, 6, 1, 7, 8, 9, 2, 3, 5, 6, 1, 8, 9, 2, 3])  # 1 ends the header, 2 the turn
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0]).roll(by)
    found = edges([("a", ids.numpy(), mask.numpy()), ("b", ids.numpy(), mask.numpy())], {2}, header=1)
    assert (found.level, said in found.message) == (level, True)


def test_what_a_checkpoint_forgets_is_noticed(healthy, monkeypatch):
    whole = checkpoint.resume

    def forgets(root, training):
        whole(root, training)
        for p in training.trained().values():
            training.optimizer.state[p]["exp_avg"].zero_()

    monkeypatch.setattr(checkpoint, "resume", forgets)
    (text,) = errors(run_preflight(healthy, CHECKED))
    assert text.startswith("resumed, a step later: loss") and "without a break" in text


def test_a_batch_without_supervised_tokens_that_does_harm_is_noticed(healthy):
    subject = Subject(healthy)
    forward = subject.trial.forward

    def harmful(**inputs):
        output = forward(**inputs)
        extra = subject.trial.fc.weight.sum() * (not inputs["batch"].supervised.any())
        return output._replace(loss=output.loss + extra)

    subject.trial.forward = harmful
    (text,) = errors(run_preflight(subject, CHECKED))
    assert text.startswith("a batch without a supervised token gives loss") and "fc.weight" in text


def test_what_does_not_fit_the_temporary_folder_is_not_tried(healthy, monkeypatch):
    monkeypatch.setattr("eyas.preflight.dry_run.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    result = run_preflight(healthy, CHECKED)
    assert errors(result) == []
    assert "not tried: " in messages(result, "dry_run") and "not tried: " in messages(result, "deploy")


def test_more_memory_than_there_is_names_the_sum_its_parts_and_what_fits(healthy, monkeypatch):
    monkeypatch.setattr(model, "available_memory", lambda device: 10_000_000)
    config = setting(train={"batch_tokens": 10**7})(healthy)
    result = run_preflight(config, ["features", "vocab", "model"], ["recomputed"])
    (finding,) = [f for s in result["stages"] for f in s["findings"] if f["level"] == "error"]
    assert "0.01 GB are free on cpu" in finding["message"] and "activations" in finding["message"]
    fits = finding["evidence"]["largest_batch"]
    assert f"set train.batch_tokens to {fits} or less" in finding["hint"] and 64 <= fits < 10**5
    mended = setting(train={"batch_tokens": fits})(healthy)
    assert errors(run_preflight(mended, ["features", "vocab", "model"], ["recomputed"])) == []


@pytest.mark.parametrize(("steps", "share"), [(2, 1.0), (6, 0.3)])
def test_estimated_activations_are_close_to_what_autograd_keeps(healthy, steps, share):
    subject = Subject(setting(train={"ttt_steps": steps})(healthy))
    draft = subject.trial
    batch = pack(subject.samples, 10**6)
    supervised = batch.supervised & (torch.rand(len(batch.supervised)) < share)
    batch = batch._replace(supervised=supervised, targets=batch.targets[: int(supervised.sum())])
    held: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        draft(batch=batch, ttt_steps=steps, ttt_step_loss_decay=0.8)
    own = {t.untyped_storage().data_ptr() for t in [*draft.parameters(), *draft.buffers()]}
    real = sum(size for place, size in held.items() if place not in own)
    config = subject.config.train.model_copy(update={"batch_tokens": len(batch.input_ids)})
    parts = model.memory_parts(draft.config, config, 1, float(supervised.float().mean()), "cpu")
    assert 0.5 < parts["activations"] / real < 2.0


def test_a_containers_limit_counts_not_the_machines_memory(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 50000000 kB\n",
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": "2000000000\n",
        "sys/fs/cgroup/job/memory.current": "900000000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 100000000\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert model.available_memory("cpu", tmp_path) == 1_200_000_000
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max")
    assert model.available_memory("cpu", tmp_path) == 50_000_000 * 1024


def test_a_system_without_proc_counts_its_whole_memory(tmp_path):
    assert model.available_memory("cpu", tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
