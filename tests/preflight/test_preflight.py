"""Every fault that the checks are there for, made on purpose in an otherwise healthy run, must be named."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.preflight import model
from eyas.preflight.finding import Subject
from eyas.preflight.runner import run_preflight
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights

DATA = ["features", "alignment"]


def errors(result) -> list[str]:
    return [f["message"] for s in result["stages"] for f in s["findings"] if f["level"] == "error"]


def messages(result, stage: str) -> str:
    return "\n".join(f["message"] for s in result["stages"] if s["name"] == stage for f in s["findings"])


def status(result) -> dict[str, str]:
    return {s["name"]: s["status"] for s in result["stages"]}


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}


def test_a_healthy_run_passes_every_stage_and_nothing_in_it_is_written(make_run):
    config = make_run()
    before = tree(Path(config.run_dir))
    result = run_preflight(config)
    assert errors(result) == []
    assert result["ok"] and set(status(result)) == {"environment", "features", "alignment", "model", "dry_run"}
    assert "failed" not in status(result).values() and "skipped" not in status(result).values()
    assert tree(Path(config.run_dir)) == before
    for f in (f for s in result["stages"] for f in s["findings"]):
        assert set(f) == {"check", "level", "message", "hint", "evidence"}
    json.dumps(result, allow_nan=False)
    assert "saved and loaded again" in messages(result, "dry_run")


def test_before_extraction_everything_is_skipped_with_the_reason(make_run):
    config = make_run().model_copy(update={"run_dir": "elsewhere"})
    result = run_preflight(config, skip=["environment"])
    assert result["ok"] and set(status(result).values()) == {"skipped"}
    assert "stage extract has not run in elsewhere" in messages(result, "features")


def test_without_a_draft_vocabulary_model_and_dry_run_are_skipped(make_run):
    result = run_preflight(make_run(vocab=False))
    assert status(result)["model"] == status(result)["dry_run"] == "skipped"
    assert "stage vocab has not run" in messages(result, "model")
    assert messages(result, "dry_run") == "skipped: memory was skipped"


def test_features_of_another_target_are_refused_and_the_rest_is_skipped(make_run, made):
    result = run_preflight(make_run(meta=replace(made[0], target_fingerprint="0" * 64)))
    assert not result["ok"] and "target_fingerprint" in errors(result)[0]
    assert status(result)["alignment"] == "skipped"
    assert "contract was skipped" in messages(result, "alignment")


def test_a_repeated_layer_is_an_error_that_names_both(make_run, changed):
    def repeat(f):
        aux = f.aux_hidden_states.clone()
        aux[:, 1] = aux[:, 0]
        return changed(f, aux_hidden_states=aux)

    result = run_preflight(make_run(repeat), ["features"])
    assert errors(result) == ["aux layer 1 and aux layer 3 hold the same states (100.0% of the values agree)"]


def test_one_state_for_all_tokens_is_an_error(make_run, changed):
    result = run_preflight(
        make_run(lambda f: changed(f, aux_hidden_states=torch.ones_like(f.aux_hidden_states))), ["features"]
    )
    assert "aux layer 1: the same state at every token" in errors(result)


def test_a_massive_channel_is_reported(make_run, changed):
    def swell(f):
        aux = f.aux_hidden_states.clone()
        aux[0, 2, 7] = 1e5
        return changed(f, aux_hidden_states=aux)

    result = run_preflight(make_run(swell), ["features"])
    found = {f["message"]: f["evidence"] for f in result["stages"][0]["findings"] if f["check"] == "states"}
    name = next(n for n in found if n.startswith("aux layer 5"))
    assert found[name]["massive"] == [7] and errors(result) == []


def test_a_nan_is_named_by_sample_tensor_layer_and_token(make_run, store_of):
    config = make_run()
    store = store_of(config)
    path = store.folder / store.shards[0]["file"]
    tensors = load_file(path)
    tensors["aux_hidden_states"][3, 1, 0] = float("nan")
    save_file(tensors, path)
    head = json.loads((store.folder / "store.json").read_text())
    head["shards"][0]["bytes"] = path.stat().st_size
    (store.folder / "store.json").write_text(json.dumps(head))
    (text,) = errors(run_preflight(config, ["features"]))
    assert "sample t0: aux_hidden_states of layer 3 at token 3 is NaN" in text


def test_a_token_outside_the_vocabulary_is_named(make_run, changed):
    def strange(f):
        ids = f.token_ids.clone()
        ids[4] = 320
        return changed(f, token_ids=ids)

    result = run_preflight(make_run(strange), ["features"])
    assert errors(result)[0] == "sample t0: token 4 is 320, the target knows ids below 320"


def test_supervised_prompts_are_a_warning(make_run, changed):
    def everything(f):
        last = f.last_hidden_state[:1].expand(len(f.token_ids), -1)
        return changed(f, loss_mask=torch.ones_like(f.loss_mask), last_hidden_state=last.contiguous())

    result = run_preflight(make_run(everything), ["features"])
    assert "prompts seem to be supervised too" in messages(result, "features")


def test_an_already_normed_last_state_is_named(make_run, changed, target_folder):
    norm = TargetWeights(TargetSpec.load(target_folder)).final_norm()
    result = run_preflight(make_run(lambda f: changed(f, last_hidden_state=norm(f.last_hidden_state))), DATA)
    assert errors(result) == ["the last hidden state looks already normed, but is declared pre_final_norm"]


def test_normed_states_that_are_declared_so_pass(make_run, changed, made, target_folder):
    norm = TargetWeights(TargetSpec.load(target_folder)).final_norm()
    meta = replace(made[0], last_hidden_state="post_final_norm")
    normed = make_run(lambda f: changed(f, last_hidden_state=norm(f.last_hidden_state)), meta=meta)
    assert errors(run_preflight(normed, DATA)) == []


def test_a_raw_last_state_declared_normed_is_named(make_run, made):
    result = run_preflight(make_run(meta=replace(made[0], last_hidden_state="post_final_norm")), DATA)
    assert "the last hidden state was never normed, but is declared post_final_norm" in errors(result)


@pytest.mark.parametrize(("by", "owner"), [(1, "p-1"), (-1, "p+1")])
def test_last_states_shifted_by_one_are_named(make_run, changed, by, owner):
    result = run_preflight(make_run(lambda f: changed(f, last_hidden_state=f.last_hidden_state.roll(by, 0))), DATA)
    assert f"the last hidden state is shifted by one: row p holds token {owner}'s" in errors(result)


def test_aux_states_shifted_by_one_are_named(make_run, changed):
    result = run_preflight(make_run(lambda f: changed(f, aux_hidden_states=f.aux_hidden_states.roll(1, 0))), DATA)
    assert "aux layer 5 is shifted by one against the last hidden state" in errors(result)


def test_states_that_the_head_does_not_understand_are_named(make_run, changed):
    def other(f):
        return changed(f, last_hidden_state=f.last_hidden_state.flip(-1).contiguous())

    assert any(
        "lm_head does not predict the stored answers" in e for e in errors(run_preflight(make_run(other), DATA))
    )


def test_features_made_with_another_head_are_named(make_run, made):
    result = run_preflight(make_run(meta=replace(made[0], head_fingerprint="0" * 64)), DATA)
    assert "the features were made with another lm_head or final norm than the target has now" in errors(result)


@pytest.mark.slow
def test_a_loss_that_does_not_fall_is_an_error(make_run):
    result = run_preflight(make_run(train={"lr": 300.0}, draft={"train_lm_head": True}), ["model", "dry_run"])
    (text,) = errors(result)
    assert text.startswith("the loss does not fall: loss ")
    json.dumps(result, allow_nan=False)


def test_more_memory_than_there_is_names_the_sum_and_its_parts(make_run, monkeypatch):
    monkeypatch.setattr(model, "available_memory", lambda device: 1_000_000)
    (text,) = errors(run_preflight(make_run(train={"batch_tokens": 10**7}), ["model"]))
    assert "0.00 GB are free on cpu" in text and "activations" in text and "optimizer" in text


@pytest.mark.parametrize(("steps", "share"), [(2, 1.0), (6, 0.3)])
def test_estimated_activations_are_close_to_what_autograd_keeps(make_run, steps, share):
    from eyas.preflight.dry_run import fresh_draft
    from eyas.train.batches import pack

    subject = Subject(make_run(train={"ttt_steps": steps}))
    draft = fresh_draft(subject)
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
    from eyas.preflight.model import available_memory

    assert available_memory("cpu", tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
