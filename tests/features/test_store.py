"""The store on the disk: what is written is read, and what is not a whole store is refused."""

import json
import pickle
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.features.contract import AXES, BadFeatures, FeatureMeta, Features
from eyas.features.store import Store, StoreWriter

META = FeatureMeta("tiny", "t", "h", "k", (2, 3), 4, "by hand", "float32")


def sample(id: str, mask: list[bool], meta: FeatureMeta = META) -> Features:
    random = torch.Generator().manual_seed(len(mask))
    n = len(mask)
    aux = torch.randn(n, len(meta.aux_layers), meta.hidden_size, generator=random)
    last = torch.randn(n, meta.hidden_size, generator=random)
    return Features.from_states(id, torch.arange(n), torch.tensor(mask), aux, last)


def write(folder: Path, samples: list[Features], meta: FeatureMeta = META, shard_bytes: int = 200) -> Store:
    writer = StoreWriter(folder, meta, shard_bytes)
    for features in samples:
        writer.add(features)
    return writer.close()


def same(a: Features, b: Features) -> bool:
    return a.id == b.id and all(torch.equal(getattr(a, n), getattr(b, n)) for n in AXES)


@pytest.fixture
def store(tmp_path, make_features, meta) -> Store:
    """Ten samples in several shards."""
    return write(tmp_path / "store", [make_features(f"s{i}", 3 + i) for i in range(10)], meta, 1000)


@settings(max_examples=30, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=7), shard_bytes=st.integers(1, 500)
)
def test_every_sample_is_read_as_written(tmp_path_factory, masks, shard_bytes):
    samples = [sample(f"id-{i}", mask) for i, mask in enumerate(masks)]
    store = write(tmp_path_factory.mktemp("store"), samples, shard_bytes=shard_bytes)
    assert len(store) == len(samples) and store.ids == [s.id for s in samples]
    assert store.lengths.tolist() == [len(m) for m in masks]
    assert store.supervised_counts.tolist() == [sum(m) for m in masks]
    assert store.lengths.dtype == store.supervised_counts.dtype == np.int64
    assert all(same(store[i], s) for i, s in enumerate(samples))


def test_shards_are_ordinary_safetensors_files_described_by_store_json(store):
    head = json.loads((store.folder / "store.json").read_text())
    assert (head["format"], head["version"], head["complete"]) == ("eyas-features", 1, True)
    assert head["axes"]["aux_hidden_states"] == ["token", "aux_layer", "hidden"]
    assert (head["layer_convention"], head["last_hidden_state"]) == ("boundary", "pre_final_norm")
    assert len(head["shards"]) > 2
    at = 0
    for shard in head["shards"]:
        tensors = load_file(store.folder / shard["file"])
        assert tensors["aux_hidden_states"].shape == (shard["tokens"], 3, 8)
        for row in range(shard["samples"]):
            begin, end = tensors["offsets"][row : row + 2].tolist()
            first, stop = tensors["last_offsets"][row : row + 2].tolist()
            features = store[at]
            assert torch.equal(features.token_ids, tensors["token_ids"][begin:end])
            assert torch.equal(features.last_hidden_state, tensors["last_hidden_state"][first:stop])
            at += 1
    assert at == head["samples"] == 10


def test_a_sample_is_a_view_of_the_map_and_writing_to_it_leaves_the_file_alone(store):
    before = store[4].aux_hidden_states.clone()
    store[4].aux_hidden_states.zero_()
    assert torch.equal(Store(store.folder)[4].aux_hidden_states, before)


def test_index_outside_is_an_index_error_so_that_iteration_ends(store):
    assert len([f.id for f in store]) == 10
    with pytest.raises(IndexError):
        store[10]
    with pytest.raises(IndexError):
        store[-1]


def test_an_opened_store_goes_to_another_process(store):
    store[0]
    assert same(pickle.loads(pickle.dumps(store))[7], store[7])


def test_a_slice_of_a_large_tensor_costs_only_its_own_bytes(tmp_path, make_features, meta):
    features = make_features(tokens=6)
    large = torch.ones(6, 50, 8, dtype=torch.bfloat16)
    sliced = replace(features, aux_hidden_states=large[:, 1:4])  # not contiguous
    store = write(tmp_path, [sliced], meta)
    assert store.shards[0]["bytes"] < 6 * 3 * 8 * 2 + 6 * 8 * 2 + 1000
    assert (store[0].aux_hidden_states == 1).all()


def test_an_empty_store_is_a_store(tmp_path, meta):
    store = write(tmp_path, [], meta)
    assert len(store) == 0 and store.lengths.shape == (0,) and store.shards == []


def test_bad_features_are_not_written(tmp_path, make_features, meta):
    features = make_features()
    features.aux_hidden_states[1, 2, 0] = float("nan")
    writer = StoreWriter(tmp_path, meta, 1)
    with pytest.raises(BadFeatures, match="layer 5 at token 1 is NaN"):
        writer.add(features)
    assert len(writer.close()) == 0


def test_an_id_that_occurs_twice_is_refused(tmp_path, make_features, meta):
    writer = StoreWriter(tmp_path, meta, 1)
    writer.add(make_features("a"))
    with pytest.raises(EyasError, match="sample id a occurs twice"):
        writer.add(make_features("a"))


def test_a_writer_that_stopped_is_continued_with_the_same_bytes(tmp_path, make_features, meta):
    samples = [make_features(f"s{i}", 4 + i) for i in range(6)]
    write(tmp_path / "whole", samples, meta, 600)
    stopped = StoreWriter(tmp_path / "parts", meta, 600)
    for features in samples[:4]:
        stopped.add(features)
    del stopped  # its last, unfinished shard is lost
    with pytest.raises(EyasError, match="not complete"):
        Store(tmp_path / "parts")
    (tmp_path / "parts" / ".shard-00001.safetensors.tmp").write_bytes(b"half")
    again = StoreWriter(tmp_path / "parts", meta, 600)
    assert 0 < len(again.ids) < 4
    for features in samples[len(again.ids) :]:
        again.add(features)
    store = again.close()
    assert store.ids == [f"s{i}" for i in range(6)] and store.lengths.tolist() == [4, 5, 6, 7, 8, 9]
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes()
    assert {p.name for p in (tmp_path / "parts").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_a_writer_refuses_a_folder_with_other_features(store):
    with pytest.raises(EyasError, match=r"aux_layers is \(2, 3, 5\), expected \(1, 3, 5\)"):
        StoreWriter(store.folder, replace(store.meta, aux_layers=(1, 3, 5)), 1)


def test_skipped_samples_are_kept_with_their_reason(tmp_path, make_features, meta):
    writer = StoreWriter(tmp_path, meta, 10**6)
    writer.skip("bad", "sample bad: NaN")
    writer.add(make_features("good"))
    assert writer.close().skipped == [{"id": "bad", "reason": "sample bad: NaN"}]


class TestRefused:
    def damaged(self, store: Store, file: str, edit) -> Path:
        copy = store.folder.with_name("damaged")
        shutil.copytree(store.folder, copy)
        edit(copy / file)
        return copy

    def edit_head(self, store: Store, **change) -> Path:
        def edit(path: Path) -> None:
            path.write_text(json.dumps(json.loads(path.read_text()) | change))

        return self.damaged(store, "store.json", edit)

    def test_a_truncated_shard_by_its_size_when_the_store_is_opened(self, store):
        size = store.shards[1]["bytes"]
        folder = self.damaged(store, "shard-00001.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1]))
        with pytest.raises(EyasError, match=f"shard-00001.safetensors has {size - 1} bytes, expected {size}"):
            Store(folder)

    def test_a_missing_shard(self, store):
        with pytest.raises(EyasError, match=r"shard-00000.safetensors has 0 bytes"):
            Store(self.damaged(store, "shard-00000.safetensors", Path.unlink))

    def test_a_folder_without_store_json(self, tmp_path):
        with pytest.raises(EyasError, match=r"no store.json"):
            Store(tmp_path)

    def test_broken_json(self, store):
        with pytest.raises(EyasError, match=r"store.json is not valid JSON"):
            Store(self.damaged(store, "store.json", lambda p: p.write_text(p.read_text()[:50])))

    def test_another_format_version_or_axis_order(self, store, tmp_path):
        with pytest.raises(EyasError, match="version is 2, expected 1"):
            Store(self.edit_head(store, version=2))
        shutil.rmtree(tmp_path / "damaged")
        with pytest.raises(EyasError, match="axes is"):
            Store(self.edit_head(store, axes=AXES | {"aux_hidden_states": ["aux_layer", "token", "hidden"]}))

    def test_a_head_without_a_field(self, store):
        def edit(path: Path) -> None:
            head = json.loads(path.read_text())
            del head["head_fingerprint"], head["skipped"]
            path.write_text(json.dumps(head))

        with pytest.raises(EyasError, match="lacks head_fingerprint, skipped"):
            Store(self.damaged(store, "store.json", edit))

    def test_fewer_ids_than_samples(self, store):
        with pytest.raises(EyasError, match="9 ids, but 10 samples"):
            Store(self.edit_head(store, ids=store.ids[1:]))

    def test_a_shard_with_another_layer_count_or_width(self, store):
        folder = self.edit_head(store, hidden_size=16)
        with pytest.raises(
            EyasError, match=r"aux_hidden_states is \(\[\d+, 3, 8\], 'BF16'\), expected \(\[\d+, 3, 16\]"
        ):
            Store(folder)[0]

    def rewrite(self, store: Store, change) -> Path:
        def edit(path: Path) -> None:
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path)

        folder = self.damaged(store, "shard-00000.safetensors", edit)
        head = json.loads((folder / "store.json").read_text())
        head["shards"][0]["bytes"] = (folder / "shard-00000.safetensors").stat().st_size
        (folder / "store.json").write_text(json.dumps(head))
        return folder

    def test_a_shard_with_a_missing_or_a_strange_tensor(self, store):
        def change(tensors: dict) -> None:
            tensors["extra"] = tensors.pop("loss_mask")

        with pytest.raises(EyasError, match=r"loss_mask is 'absent'.*extra is .* expected 'absent'"):
            Store(self.rewrite(store, change))[0]

    def test_offsets_that_fall(self, store):
        def change(tensors: dict) -> None:
            tensors["offsets"][1] = 10**6

        with pytest.raises(EyasError, match="offsets must rise"):
            Store(self.rewrite(store, change)).lengths  # noqa: B018

    def test_a_value_that_turned_bad_on_the_disk_names_file_sample_layer_and_token(self, store):
        def change(tensors: dict) -> None:
            tensors["aux_hidden_states"][3, 1, 0] = float("inf")  # the first sample has 3 tokens

        folder = self.rewrite(store, change)
        with pytest.raises(
            BadFeatures, match=r"shard-00000.safetensors: sample s1: aux_hidden_states of layer 3 at token 0"
        ):
            Store(folder)[1]

    def test_features_of_another_target_or_tokenizer_name_both(self, store):
        store.check(**{k: v for k, v in asdict(store.meta).items() if k != "engine"})
        with pytest.raises(EyasError, match="tokenizer_fingerprint is 'kkkkkkkk', expected 'other'"):
            store.check(tokenizer_fingerprint="other", aux_layers=[2, 3, 5])


def test_opening_and_one_sample_read_only_what_they_need(tmp_path, meta):
    """A store of 64 MB: opening it and reading one sample touches a few pages of its map."""
    wide = replace(meta, hidden_size=4096)
    folder = tmp_path / "wide"
    one = sample("s", [True] * 64, wide)
    write(folder, [replace(one, id=f"s{i}") for i in range(40)], wide, 10**9)

    def file_pages() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    before = file_pages()
    Store(folder)[20]
    assert file_pages() - before < 16_000  # kB; one sample has 2,048
