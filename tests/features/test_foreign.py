"""Files as other tools write them."""

import fcntl
import gzip
import io
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.features.foreign import load_pickle, read_foreign

T, A, H = 5, 3, 4
IDS, MASK = torch.arange(T), torch.tensor([0, 0, 1, 1, 1])
AUX = torch.arange(T * A * H, dtype=torch.float32).view(T, A, H).bfloat16()
LAST = torch.full((T, H), 7.0).bfloat16()

V0 = {"input_ids": IDS, "loss_mask": MASK, "hidden_state": AUX.flatten(1), "target": LAST}
V1 = {"input_ids": IDS, "loss_mask": MASK, "hidden_states": [*AUX.unbind(1), LAST]}
SPECFORGE = {
    "input_ids": IDS,
    "loss_mask": MASK,
    "aux_hidden_state": AUX.flatten(1)[None],
    "hidden_state": LAST[None],
}
VLLM = {"hidden_states": torch.cat([AUX, LAST[:, None]], 1), "token_ids": IDS}


def save(path: Path, data: dict) -> Path:
    if path.suffix == ".safetensors":
        save_file(data, path)
    elif path.suffix == ".gz":
        plain = io.BytesIO()
        torch.save(data, plain)
        path.write_bytes(gzip.compress(plain.getvalue()))
    else:
        torch.save(data, path)
    return path


@pytest.mark.parametrize(
    ("file", "data", "format", "norm"),
    [
        ("data_0.pt", V0, "speculators_v0", "post_final_norm"),
        ("data_0.pt", V1, "speculators_v1", "pre_final_norm"),
        ("data_0.ckpt", SPECFORGE, "specforge", "post_final_norm"),
        ("data_0.ckpt.gz", SPECFORGE, "specforge", "post_final_norm"),
        ("hs_0.safetensors", VLLM, "vllm", "pre_final_norm"),
    ],
)
def test_each_format_gives_the_same_tensors_and_states_its_norm(tmp_path, file, data, format, norm):
    sample = read_foreign(save(tmp_path / file, data))
    assert (sample["format"], sample["last_hidden_state_norm"]) == (format, norm)
    assert torch.equal(sample["aux_hidden_states"], AUX)
    assert torch.equal(sample["last_hidden_state"], LAST)
    assert torch.equal(sample["token_ids"], IDS)
    if format == "vllm":
        assert sample["loss_mask"] is None
    else:
        assert sample["loss_mask"].dtype == torch.bool and sample["loss_mask"].tolist() == MASK.bool().tolist()


def test_hidden_state_means_aux_in_one_tool_and_the_last_state_in_the_other(tmp_path):
    """The same key, told apart by its neighbours."""
    v0, forge = read_foreign(save(tmp_path / "a.pt", V0)), read_foreign(save(tmp_path / "b.ckpt", SPECFORGE))
    assert torch.equal(v0["aux_hidden_states"], forge["aux_hidden_states"])


class Boom:
    def __reduce__(self):
        return os.system, ("touch /tmp/eyas-was-here",)


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path):
    path = save(tmp_path / "evil.pt", {"input_ids": Boom()})
    with pytest.raises(EyasError, match=r"evil.pt cannot be read"):
        read_foreign(path)
    assert not Path("/tmp/eyas-was-here").exists()


@pytest.mark.parametrize("file", ["a.pt", "a.ckpt.gz", "a.safetensors"])
def test_truncated_file_is_named(tmp_path, file):
    path = save(tmp_path / file, VLLM if file.endswith("safetensors") else V1)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(EyasError, match=file):
        read_foreign(path)


@pytest.mark.parametrize("file", ["a.pt", "a.ckpt.gz", "a.safetensors"])
def test_missing_file_is_named(tmp_path, file):
    with pytest.raises(EyasError, match=f"{file} cannot be read: .*No such file"):
        read_foreign(tmp_path / file)


def test_unknown_keys_are_listed(tmp_path):
    with pytest.raises(EyasError, match=r"\['input_ids', 'states'\]"):
        read_foreign(save(tmp_path / "a.pt", {"input_ids": IDS, "states": LAST}))


def test_a_list_or_a_tensor_is_no_sample(tmp_path):
    torch.save([IDS], tmp_path / "a.pt")
    with pytest.raises(EyasError, match="holds a list, expected a dict"):
        load_pickle(tmp_path / "a.pt")


def test_a_dump_short_by_some_blocks_is_refused(tmp_path):
    """Prefix caching can cost a dump its first blocks: states and token ids then differ in number."""
    path = save(tmp_path / "a.safetensors", {**VLLM, "hidden_states": VLLM["hidden_states"][2:]})
    with pytest.raises(EyasError, match=r"differ in length: .*'token_ids': 5, 'aux_hidden_states': 3"):
        read_foreign(path)


def test_a_file_without_its_mask_is_refused(tmp_path):
    with pytest.raises(EyasError, match="needs input_ids and loss_mask"):
        read_foreign(save(tmp_path / "a.pt", {k: v for k, v in V1.items() if k != "loss_mask"}))


def test_a_held_lock_is_waited_for_and_named(tmp_path, capfd):
    path, lock = tmp_path / "r.safetensors", tmp_path / "r.safetensors.lock"
    held = lock.open("wb")
    fcntl.flock(held, fcntl.LOCK_EX)

    def writer() -> None:
        time.sleep(0.2)
        save_file(VLLM, path)
        held.close()

    thread = threading.Thread(target=writer)
    thread.start()
    assert torch.equal(read_foreign(path)["last_hidden_state"], LAST)
    thread.join()
    assert "r.safetensors.lock" in capfd.readouterr().err.replace("\n", "")


def test_a_free_lock_file_or_none_means_the_data_is_complete(tmp_path):
    path = save(tmp_path / "r.safetensors", VLLM)
    (tmp_path / "r.safetensors.lock").touch()
    assert read_foreign(path)["format"] == "vllm"
