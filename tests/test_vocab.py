"""Draft vocabularies: which ids are kept, the two tables, and every way a mapping can be wrong."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from eyas.config import RunConfig
from eyas.data import prepare
from eyas.data.samples import Sample, write_samples
from eyas.errors import EyasError
from eyas.pipeline import Context
from eyas.target.spec import TargetSpec
from eyas.vocab import (
    build_vocab_mapping,
    build_vocab_mappings_from_distribution,
    check_vocab_mapping,
    read_vocab_mapping,
    run,
    vocab_facts,
)
from tests.tiny import make_conversations, make_target


def counts(V, **seen):
    return np.array([seen.get(f"t{i}", 0) for i in range(V)], dtype=np.int64)


def kept(mapping):
    return np.flatnonzero(mapping[1]).tolist()


def test_d2t_holds_offsets():
    d2t, t2d = build_vocab_mapping(counts(8, t0=1, t1=1, t2=1, t3=1), 4)
    assert d2t.dtype == np.int64
    assert d2t.tolist() == [0, 0, 0, 0]
    assert t2d.tolist() == [True] * 4 + [False] * 4
    d2t, t2d = build_vocab_mapping(counts(8, t2=5, t7=9, t4=1), 3)
    assert d2t.tolist() == [2, 3, 5]
    assert (np.arange(3) + d2t).tolist() == kept((d2t, t2d)) == [2, 4, 7]


def test_more_places_than_distinct_tokens_are_filled_with_the_lowest_unused_ids_that_are_tokens():
    assert kept(build_vocab_mapping(counts(8, t5=3), 4)) == [0, 1, 2, 5]
    assert kept(build_vocab_mapping(counts(8, t3=3), 4, [4], usable=5)) == [0, 1, 3, 4]
    with pytest.raises(EyasError, match=r"expected 1 to 5 .*, found 6"):
        build_vocab_mapping(counts(8), 6, usable=5)


def test_pinned_ids_come_first_and_must_fit():
    assert kept(build_vocab_mapping(counts(8, t5=3, t6=2), 2, [7])) == [5, 7]
    with pytest.raises(EyasError, match=r"vocab\.size 2 is less than the 3 pinned ids"):
        build_vocab_mapping(counts(8), 2, [1, 2, 3])
    with pytest.raises(EyasError, match="must lie in the 8 real tokens"):
        build_vocab_mapping(counts(8), 2, [8])


COUNTS = st.lists(st.integers(0, 4), min_size=4, max_size=24)


@given(st.data())
def test_every_mapping_is_valid_and_smaller_ones_are_contained_in_larger_ones(data):
    seen = np.array(data.draw(COUNTS), dtype=np.int64)
    V = len(seen)
    pinned = data.draw(st.lists(st.integers(0, V - 1), max_size=3))
    sizes = sorted(data.draw(st.lists(st.integers(max(1, len(set(pinned))), V), min_size=2, max_size=3)))
    sets = []
    for size in sizes:
        d2t, t2d = build_vocab_mapping(seen, size, pinned)
        check_vocab_mapping(d2t, t2d, V)
        assert len(d2t) == size
        sets.append(set(kept((d2t, t2d))))
        outside = np.delete(seen, sorted(sets[-1]))
        assert set(pinned) <= sets[-1]
        free = [seen[i] for i in sets[-1] - set(pinned)]
        assert not free or not len(outside) or min(free) >= outside.max()
    assert all(a <= b for a, b in pairwise(sets))


def test_the_public_function_gives_tensors_and_takes_ids_as_read_from_json():
    d2t, t2d = build_vocab_mappings_from_distribution({"5": 3, 2: 1}, 2, 8)
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert d2t.tolist() == [2, 4]
    assert t2d.nonzero().flatten().tolist() == [2, 5]
    check_vocab_mapping(d2t, t2d, 8)
    with pytest.raises(EyasError, match="token id 8 is outside"):
        build_vocab_mappings_from_distribution({8: 1}, 2, 8)


T2D = np.array([True, True, False, True, False])


@pytest.mark.parametrize(
    ("d2t", "t2d", "said"),
    [
        (np.array([0, 0, -1]), T2D, "draft rows 1 and 2 both decode to target id 1"),
        (np.array([0, 0, 3]), T2D, "draft row 2 decodes to target id 5, outside 0..4"),
        (np.array([-1, 0, 1]), T2D, "draft row 0 decodes to target id -1"),
        (np.array([3, 0, 1]), T2D, "target ids do not ascend at draft row 1"),
        (np.array([0, 0, 2]), T2D, "not the same ids"),
        (np.array([0, 1, 3], np.int32), T2D, "d2t: expected 1-D int64, found int32"),
        (np.array([0, 0, 1]), T2D[None], "t2d: expected 1-D bool of length 5, found bool of shape .1, 5."),
        (np.array([0, 0, 1]), T2D.astype(np.int64), "t2d: expected 1-D bool"),
        (None, T2D, "d2t is missing: .* both .* or neither"),
        (np.array([0, 0, 1]), None, "t2d is missing"),
    ],
)
def test_a_wrong_mapping_is_refused_with_field_found_and_expected(d2t, t2d, said):
    with pytest.raises(EyasError, match=said):
        check_vocab_mapping(d2t, t2d, 5)


def test_neither_table_means_the_full_vocabulary():
    check_vocab_mapping(None, None, 5)
    check_vocab_mapping(np.array([0, 0, 1]), T2D, 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"), layers=2)


def context(folder, target, size) -> Context:
    config = RunConfig.parse({"target": {"model": str(target)}, "vocab": {"size": size}})
    (folder / "vocab").mkdir(parents=True, exist_ok=True)
    return Context(config, folder, folder / "vocab")


def with_samples(folder, target, rows, **facts):
    """A prepare stage that holds (token ids, mask) rows."""
    spec = TargetSpec.load(str(target))
    noted = {"target": spec.name, "target_fingerprint": spec.fingerprint}
    noted |= {"added_ids": [], "byte_ids": [], "tokenizer_length": spec.vocab_size} | facts
    none = np.array([], np.int32)
    samples = [
        Sample(str(i), "train", None, np.array(ids, np.int32), np.array(mask, np.bool_), none)
        for i, (ids, mask) in enumerate(rows)
    ]
    write_samples(folder / "prepare" / "samples.parquet", samples, noted)
    (folder / "prepare" / "manifest.json").write_text("{}")


def test_only_supervised_tokens_are_counted_and_coverage_is_their_share(tmp_path, target):
    rows = [([1, 1, 1, 12, 13], [0, 0, 0, 1, 1]), ([12, 12, 12, 12, 14], [1, 1, 0, 0, 1])]
    with_samples(tmp_path, target, rows)
    result = run(context(tmp_path, target, 2))
    assert result["counts"]["supervised"] == 5
    assert result["counts"]["distinct"] == 3
    assert kept(read_vocab_mapping(tmp_path / "vocab", 320)) == [2, 12]  # end of turn, and the most frequent
    assert result["coverage"] == 0.6
    assert result["d2t"] == "offsets: draft id 1 + 11 = target id 12"
    json.dumps(result, allow_nan=False)


def test_padding_rows_of_the_models_vocabulary_are_never_chosen(tmp_path, target):
    with_samples(tmp_path, target, [([5, 6], [1, 1])], tokenizer_length=310)
    result = run(context(tmp_path, target, 315))
    d2t, t2d = read_vocab_mapping(tmp_path / "vocab", 320)
    assert (len(d2t), len(t2d), result["tokenizer_length"]) == (310, 320, 310)
    assert not t2d[310:].any()


def test_the_full_vocabulary_needs_no_tables(tmp_path, target):
    with_samples(tmp_path, target, [([5, 6], [1, 1])])
    result = run(context(tmp_path, target, 320))
    assert result["full_vocabulary"]
    assert result["coverage"] == 1.0
    assert list((tmp_path / "vocab").iterdir()) == []
    assert read_vocab_mapping(tmp_path / "vocab", 320) is None


def test_ids_beyond_the_model_and_samples_of_another_target_are_refused(tmp_path, target):
    with_samples(tmp_path, target, [([5, 320], [1, 1])])
    with pytest.raises(EyasError, match="sample 0 has token id 320, the target has 320 ids"):
        run(context(tmp_path, target, 8))
    with_samples(tmp_path, target, [([5, 6], [1, 1])], target_fingerprint="0" * 64)
    with pytest.raises(EyasError, match=r"was prepared for .*000000000000"):
        run(context(tmp_path, target, 8))


def test_a_stored_mapping_is_checked_when_read(tmp_path):
    save_file({"d2t": np.array([0, 0, -1]), "t2d": T2D}, tmp_path / "vocab.safetensors")
    with pytest.raises(EyasError, match="both decode to target id 1"):
        read_vocab_mapping(tmp_path, 5)


def test_from_prepared_data_alone_sizes_8_and_16_are_nested(tmp_path, target):
    source = make_conversations(tmp_path / "c.jsonl", 40)
    config = RunConfig.parse({"target": {"model": str(target)}, "data": {"sources": [str(source)]}})
    prepare.run(Context(config, tmp_path, tmp_path / "prepare"))
    (tmp_path / "prepare" / "manifest.json").write_text("{}")
    sets = []
    for size in (8, 16, 300):
        result = run(context(tmp_path, target, size))
        tables = load_file(tmp_path / "vocab" / "vocab.safetensors")
        check_vocab_mapping(tables["d2t"], tables["t2d"], 320)
        sets.append(set(kept((tables["d2t"], tables["t2d"]))))
        n = result["counts"]
        assert n["draft_vocab"] == size == n["pinned"] + n["by_frequency"] + n["never_seen"]
        assert n["pinned"] == 3
    assert sets[0] < sets[1] < sets[2]
    assert sets[0] >= {0, 1, 2}  # the special tokens


def test_single_bytes_and_special_tokens_are_kept_though_the_corpus_has_none(tmp_path, smollm2, smollm2_tokenizer):
    facts = vocab_facts(smollm2_tokenizer)
    ids = smollm2_tokenizer("The quick brown fox jumps over the lazy dog. " * 3).input_ids
    with_samples(tmp_path, smollm2, [(ids, [1] * len(ids))], **facts)
    result = run(context(tmp_path, smollm2, 1024))
    chosen = set(kept(read_vocab_mapping(tmp_path / "vocab", 49152)))
    accented = smollm2_tokenizer.convert_tokens_to_ids(["Ã", "©"])  # the bytes of é
    assert set(facts["byte_ids"]) | set(facts["added_ids"]) <= chosen
    assert set(accented) <= chosen
    assert result["coverage"] == 1.0
    assert result["counts"]["pinned"] == 17


def test_reserved_tokens_are_not_pinned(llama31_tokenizer):
    facts = vocab_facts(llama31_tokenizer)
    names = llama31_tokenizer.convert_ids_to_tokens(facts["added_ids"])
    assert "<|eot_id|>" in names
    assert not any("reserved" in name for name in names)
    assert len(facts["byte_ids"]) == 256
    assert facts["tokenizer_length"] == 128256
