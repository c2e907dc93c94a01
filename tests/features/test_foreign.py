"""Files of other tools: told apart by their keys, brought into one form, and refused where they are broken."""

import fcntl
import gzip
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.features.foreign import layer_list, load, open_features, parse, unlike
from eyas.features.store import Store

T, A, H = 7, 3, 4
IDS, MASK = torch.arange(T), (torch.arange(T) > 3).long()
AUX, LAST = torch.rand(T, A, H), torch.rand(T, H)
ABOUT = {"input_ids": IDS, "loss_mask": MASK}
FILES = {
    "speculators v1": ABOUT | {"hidden_states": [*AUX.unbind(1), LAST]},
    "speculators v0": ABOUT | {"hidden_state": AUX.flatten(1), "target": LAST},
    "SpecForge": ABOUT | {"aux_hidden_state": AUX.flatten(1)[None], "hidden_state": LAST[None]},
    "Model-Optimizer": ABOUT | {"aux_hidden_states": AUX.flatten(1), "hidden_states": LAST},
    "vLLM hidden states": {"token_ids": IDS, "hidden_states": torch.cat([AUX, LAST[:, None]], 1)},
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_tensors(name):
    raw = parse(Path("a"), FILES[name])
    assert raw.format == name
    assert torch.equal(raw.token_ids, IDS) and torch.equal(raw.aux, AUX) and torch.equal(raw.last, LAST)
    assert (raw.loss_mask is None) == (name == "vLLM hidden states")


def test_samples_are_spread_over_the_folder_and_keep_the_supervised_rows(tmp_path):
    for i in range(5):
        torch.save(FILES["speculators v1"], tmp_path / f"data_{i}.pt")
    torch.save({1: 2}, tmp_path / "token_freq.pt")  # lies beside samples, and is none
    folder = open_features(tmp_path)
    assert len(folder) == 5
    one, two = folder.spread(2)
    assert (one.id, two.id) == ("data_0.pt", "data_2.pt")
    assert one.last_hidden_state.shape == (3, H) and one.aux_hidden_states.shape == (T, A, H)


def test_without_a_mask_every_token_counts(tmp_path):
    save_file(FILES["vLLM hidden states"], tmp_path / "hs_0.safetensors")
    (one,) = open_features(tmp_path).spread(8)
    assert one.loss_mask.all() and len(one.last_hidden_state) == T


def test_compressed_files_are_read(tmp_path):
    buffer = io.BytesIO()
    torch.save(FILES["SpecForge"], buffer)
    (tmp_path / "data_0.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
    assert open_features(tmp_path).read("data_0.ckpt.gz").format == "SpecForge"


def test_a_store_is_found_where_a_run_keeps_it(tmp_path):
    from tests.train.test_dataset import write_store

    write_store(tmp_path / "features" / "train", [5, 6])
    assert isinstance(open_features(tmp_path), Store) and isinstance(open_features(tmp_path / "features"), Store)


def test_a_mixed_folder_has_more_than_one_signature(tmp_path):
    save_file(FILES["vLLM hidden states"], tmp_path / "hs_0.safetensors")
    torch.save(FILES["speculators v1"], tmp_path / "data_0.pt")
    assert sorted(unlike(open_features(tmp_path), 8).values()) == ["data_0.pt", "hs_0.safetensors"]


def test_a_lock_that_nobody_holds_does_not_matter(tmp_path):
    path = tmp_path / "hs_0.safetensors"
    save_file(FILES["vLLM hidden states"], path)
    with open(tmp_path / "hs_0.safetensors.lock", "w") as lock:
        assert load(path).keys() == {"token_ids", "hidden_states"}
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EyasError, match=r"hs_0.safetensors is still being written"):
            load(path)


def test_one_tensor_is_no_list_of_layers():
    with pytest.raises(EyasError, match=r"hidden_states is one tensor \[7, 4\] where .* poses as all of them"):
        layer_list(LAST, "here")
    with pytest.raises(EyasError, match="a stacked tensor is unpacked along its first axis"):
        layer_list(AUX, "here")
    assert len(layer_list([*AUX.unbind(1), LAST], "here")) == A + 1
