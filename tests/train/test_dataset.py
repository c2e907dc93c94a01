"""The names a training script uses: shapes, shifts and packing by value."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from eyas.errors import EyasError
from eyas.features.contract import FeatureMeta, Features
from eyas.features.store import StoreWriter
from eyas.train import (
    AddGaussianNoise,
    Eagle3SampleFileDataset,
    create_collate_fn,
    list_files,
    shift_batch,
    slice_and_pad_to_length,
    split_files,
    standardize_data_v0,
    standardize_data_v1,
)

A, H = 3, 4
KEYS = {"input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids", "lengths"}


def v1(tokens: int, start: int = 100) -> dict:
    """Token ids count from `start`; state of layer a at token t is a + t / 100, the last state 1000 + t."""
    t = torch.arange(tokens)
    states = [(a + t[:, None] / 100).expand(tokens, H).clone() for a in range(A)]
    return {
        "input_ids": start + t,
        "loss_mask": (t >= tokens // 2).long(),
        "hidden_states": [*states, (1000.0 + t[:, None]).expand(tokens, H).clone()],
    }


def write_files(folder: Path, lengths: list[int]) -> Path:
    folder.mkdir(exist_ok=True)
    for i, tokens in enumerate(lengths):
        torch.save(v1(tokens, 100 * (i + 1)), folder / f"data_{i}.pt")
    return folder


def write_store(folder: Path, lengths: list[int]) -> Path:
    meta = FeatureMeta("tiny", "t", "h", "k", (2, 3, 5), H, "by hand", "float32")
    writer = StoreWriter(folder, meta, 500)
    for i, tokens in enumerate(lengths):
        data = v1(tokens, 100 * (i + 1))
        aux = torch.stack(data["hidden_states"][:-1], 1) + 1  # no all-zero state
        last = data["hidden_states"][-1]
        writer.add(Features.from_states(f"s{i}", data["input_ids"], data["loss_mask"], aux, last))
    writer.close()
    return folder


class TestShift:
    def test_tokens_move_against_states_by_one(self):
        t = torch.arange(6)
        batch = {k: t.clone() for k in KEYS - {"lengths"}} | {"lengths": torch.tensor([6])}
        shifted = shift_batch(batch)
        assert shifted["hidden_states"].tolist() == [0, 1, 2, 3, 4]
        for key in KEYS - {"hidden_states", "lengths"}:
            assert shifted[key].tolist() == [1, 2, 3, 4, 5]
        assert shifted["lengths"].tolist() == [5]
        assert batch["input_ids"].tolist() == t.tolist()

    def test_no_length_below_zero(self):
        empty = {k: torch.arange(0) for k in KEYS - {"lengths"}} | {"lengths": torch.tensor([0])}
        assert shift_batch(empty)["lengths"].tolist() == [0]

    @pytest.mark.parametrize("key", sorted(KEYS))
    def test_all_six_keys_are_needed(self, key):
        batch = {k: torch.arange(3) for k in KEYS - {key}}
        with pytest.raises(KeyError, match=key):
            shift_batch(batch)


class TestPad:
    @given(st.integers(0, 6), st.integers(0, 6))
    def test_cut_or_filled_with_zeros(self, rows, length):
        tensor = torch.arange(1, 2 * rows + 1).view(rows, 2)
        made = slice_and_pad_to_length(tensor, length)
        assert made.shape == (length, 2) and made.dtype == tensor.dtype
        assert torch.equal(made[:rows], tensor[:length]) and made[rows:].abs().sum() == 0


class TestFiles:
    def test_found_at_any_depth_by_suffix_and_sorted(self, tmp_path):
        for name in ("b.pt", "a.pt", "deep/er/c.pt", "sample_lengths.json", "pt/readme.md"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        assert [p.relative_to(tmp_path).as_posix() for p in list_files(tmp_path)] == [
            "a.pt",
            "b.pt",
            "deep/er/c.pt",
        ]

    def test_split_keeps_every_file_once_by_ratio_and_seed(self, tmp_path):
        for i in range(20):
            (tmp_path / f"{i}.pt").touch()
        train, val = split_files(tmp_path)
        assert len(train) == 18 and len(val) == 2 and sorted(train + val) == list_files(tmp_path)
        assert split_files(tmp_path, 0.9, 0) == (train, val) != split_files(tmp_path, 0.9, 1)
        assert len(split_files(tmp_path, ratio=0.5)[0]) == 10
        assert split_files(tmp_path, ratio=1.0)[1] == []


class TestStandardize:
    def test_v1_joins_the_aux_states_and_takes_the_last_of_the_list(self):
        made = standardize_data_v1(v1(5))
        assert made["hidden_states"].shape == (5, A * H)
        assert made["hidden_states"][2].tolist() == pytest.approx([a + 0.02 for a in range(A) for _ in range(H)])
        assert made["verifier_last_hidden_states"][:, 0].tolist() == [1000, 1001, 1002, 1003, 1004]

    def test_a_single_layer_is_not_unpacked_token_by_token(self):
        with pytest.raises(EyasError, match=r"one tensor \[5, 4\] .*: a single layer poses as all of them"):
            standardize_data_v1(v1(5) | {"hidden_states": v1(5)["hidden_states"][0]})

    def test_v0_has_the_same_form(self):
        new = standardize_data_v1(v1(5))
        old = {
            "input_ids": new["input_ids"],
            "loss_mask": new["loss_mask"],
            "hidden_state": new["hidden_states"],
            "target": new["verifier_last_hidden_states"],
        }
        made = standardize_data_v0(old)
        assert made.keys() == new.keys() and all(torch.equal(made[k], new[k]) for k in new)


@pytest.fixture(params=["files", "store"])
def dataset(request, tmp_path) -> Eagle3SampleFileDataset:
    write = write_files if request.param == "files" else write_store
    return Eagle3SampleFileDataset(32, datapath=write(tmp_path / "data", [5, 9, 7]))


class TestDataset:
    def test_every_tensor_has_one_row_less_than_tokens(self, dataset):
        assert len(dataset) == 3
        for sample, tokens in zip(dataset, (5, 9, 7), strict=True):
            assert sample.keys() == KEYS
            assert sample["lengths"].tolist() == [tokens - 1]
            assert sample["position_ids"].tolist() == list(range(1, tokens))
            assert sample["hidden_states"].shape == (tokens - 1, A * H)
            assert sample["verifier_last_hidden_states"].shape == (tokens - 1, H)
            assert sample["input_ids"].shape == sample["loss_mask"].shape == (tokens - 1,)
            assert sample["hidden_states"].dtype == sample["verifier_last_hidden_states"].dtype == torch.float32
            assert sample["input_ids"].dtype == torch.int64

    def test_row_t_has_states_of_t_and_token_mask_and_target_of_t_plus_one(self, dataset):
        sample = dataset[1]
        assert sample["input_ids"].tolist() == [200 + t + 1 for t in range(8)]
        assert sample["loss_mask"].long().tolist() == [int(t + 1 >= 4) for t in range(8)]
        base = 0 if dataset.store is None else 1
        assert sample["hidden_states"][:, 0].tolist() == pytest.approx(
            [base + t / 100 for t in range(8)], rel=1e-2
        )
        counted = sample["loss_mask"].bool()
        wanted = torch.tensor([1000.0 + t + 1 for t in range(8)]).bfloat16().float()
        assert torch.equal(sample["verifier_last_hidden_states"][counted, 0].bfloat16().float(), wanted[counted])

    def test_lengths_are_known_beforehand(self, dataset):
        approx = dataset.approx_lengths
        assert approx[0] == 4 and len(approx) == 3
        if dataset.store is not None:
            assert approx == [4, 8, 6]

    def test_noise_comes_before_the_shift_and_leaves_the_data_alone(self, dataset):
        again = Eagle3SampleFileDataset(
            32,
            file_list=dataset.files or None,
            datapath=dataset.store and dataset.store.folder,
            transform=AddGaussianNoise(0.5),
        )
        plain = dataset[2]
        torch.manual_seed(0)
        noisy = again[2]
        torch.manual_seed(0)
        assert torch.equal(again[2]["hidden_states"], noisy["hidden_states"])
        torch.manual_seed(0)
        noise = torch.randn(7, A * H) * 0.5
        torch.testing.assert_close(noisy["hidden_states"], plain["hidden_states"] + noise[:-1])
        assert torch.equal(noisy["verifier_last_hidden_states"], plain["verifier_last_hidden_states"])
        assert torch.equal(dataset[2]["hidden_states"], plain["hidden_states"])

    def test_a_sample_never_holds_on_to_a_whole_shard(self, tmp_path):
        folder = write_store(tmp_path / "s", [5, 9, 7])
        sample = Eagle3SampleFileDataset(32, folder, hidden_states_dtype=torch.bfloat16)[1]
        assert sample["hidden_states"].dtype == torch.bfloat16
        assert all(v.untyped_storage().nbytes() <= 9 * A * H * 2 for v in sample.values())


def test_a_store_gives_zeros_where_no_last_state_is_kept(tmp_path):
    sample = Eagle3SampleFileDataset(32, write_store(tmp_path / "s", [8]))[0]
    assert sample["loss_mask"].tolist() == [False] * 3 + [True] * 4
    assert sample["verifier_last_hidden_states"][:3].abs().sum() == 0
    assert (sample["verifier_last_hidden_states"][3:] != 0).all()


def test_exactly_one_source_is_given(tmp_path):
    folder = write_files(tmp_path / "d", [4])
    with pytest.raises(ValueError, match="datapath or file_list"):
        Eagle3SampleFileDataset(8)
    with pytest.raises(ValueError, match="datapath or file_list"):
        Eagle3SampleFileDataset(8, datapath=folder, file_list=list_files(folder))
    assert len(Eagle3SampleFileDataset(8, file_list=[str(folder / "data_0.pt")])) == 1


def test_a_folder_without_samples_is_an_error(tmp_path):
    with pytest.raises(EyasError, match="holds no samples"):
        Eagle3SampleFileDataset(8, datapath=tmp_path)
    with pytest.raises(EyasError, match="holds no samples"):
        Eagle3SampleFileDataset(8, file_list=[])


def test_files_of_another_format_are_named_with_their_keys(tmp_path):
    torch.save({"input_ids": torch.arange(3), "hidden_state": torch.ones(3, 4)}, tmp_path / "a.pt")
    with pytest.raises(EyasError, match=r"a.pt has no key 'hidden_states' but \['hidden_state', 'input_ids'\]"):
        Eagle3SampleFileDataset(8, datapath=tmp_path)[0]


class Boom:
    def __reduce__(self):
        return os.system, ("touch /tmp/eyas-was-here",)


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path):
    torch.save({"input_ids": Boom()}, tmp_path / "evil.pt")
    with pytest.raises(EyasError, match=r"evil.pt cannot be read"):
        Eagle3SampleFileDataset(8, datapath=tmp_path)[0]
    assert not Path("/tmp/eyas-was-here").exists()


def test_a_truncated_file_is_named(tmp_path):
    path = write_files(tmp_path / "d", [5]) / "data_0.pt"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(EyasError, match=r"data_0.pt cannot be read"):
        Eagle3SampleFileDataset(8, datapath=tmp_path)[0]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(EyasError, match=r"a.pt cannot be read: .*No such file"):
        Eagle3SampleFileDataset(8, file_list=[tmp_path / "a.pt"])[0]


def test_a_list_or_a_tensor_is_no_sample(tmp_path):
    torch.save([torch.arange(3)], tmp_path / "a.pt")
    with pytest.raises(EyasError, match="holds a list, expected a dict"):
        Eagle3SampleFileDataset(8, datapath=tmp_path)[0]


class TestApproxLengths:
    def test_follow_file_size(self, tmp_path):
        folder = write_files(tmp_path / "d", [300, 600])
        first, second = Eagle3SampleFileDataset(8, datapath=folder).approx_lengths
        assert first == 299 and second == pytest.approx(600, rel=0.1)

    def test_are_exact_beside_a_table_whose_keys_are_strings(self, tmp_path):
        folder = write_files(tmp_path / "d", [5, 9])
        (folder / "sample_lengths.json").write_text(json.dumps({"0": 5, "1": 9}))
        assert Eagle3SampleFileDataset(8, datapath=folder).approx_lengths == [4, 8]

    def test_a_missing_entry_is_an_error_not_a_default(self, tmp_path):
        folder = write_files(tmp_path / "d", [5, 9])
        (folder / "sample_lengths.json").write_text(json.dumps({"0": 5}))
        with pytest.raises(EyasError, match="no entry for sample 1"):
            Eagle3SampleFileDataset(8, datapath=folder).approx_lengths  # noqa: B018


class TestCollate:
    def test_samples_are_packed_one_after_the_other_and_the_rest_is_zero(self, dataset):
        batch = create_collate_fn(32)([dataset[i] for i in range(3)])
        assert batch.keys() == KEYS
        assert batch["lengths"].tolist() == [4, 8, 6] and batch["lengths"].dtype == torch.int64
        assert batch["hidden_states"].shape == (1, 32, A * H)
        assert batch["verifier_last_hidden_states"].shape == (1, 32, H)
        for key in KEYS - {"lengths"}:
            joined = torch.cat([dataset[i][key] for i in range(3)])
            assert torch.equal(batch[key][0, :18], joined) and batch[key].dtype == joined.dtype
            assert not batch[key][0, 18:].any()

    def test_the_sample_that_crosses_the_end_is_cut_and_later_ones_are_dropped(self, dataset):
        samples = [dataset[i] for i in range(3)]
        batch = create_collate_fn(10)(samples)
        assert batch["lengths"].tolist() == [4, 6]
        assert batch["input_ids"].tolist() == [
            torch.cat([samples[0]["input_ids"], samples[1]["input_ids"][:6]]).tolist()
        ]

    def test_a_full_batch_has_no_empty_last_sample(self, dataset):
        assert create_collate_fn(12)([dataset[i] for i in range(3)])["lengths"].tolist() == [4, 8]

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 30))
    def test_lengths_add_up(self, lengths, max_len):
        samples = [{"input_ids": torch.ones(n), "lengths": torch.tensor([n])} for n in lengths]
        batch = create_collate_fn(max_len)(samples)
        assert batch["lengths"].sum() == min(sum(lengths), max_len) == batch["input_ids"].sum()
        assert batch["lengths"].tolist()[:-1] == lengths[: len(batch["lengths"]) - 1]

    @pytest.mark.slow
    def test_workers_of_a_loader_send_the_same_batches(self, dataset):
        plain, workers = (
            list(DataLoader(dataset, batch_size=2, collate_fn=create_collate_fn(16), num_workers=n))
            for n in (0, 2)
        )
        assert len(plain) == len(workers) == 2
        for a, b in zip(plain, workers, strict=True):
            assert all(torch.equal(a[k], b[k]) for k in KEYS)
