import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data.samples import Sample, read_metadata, read_samples, write_samples
from eyas.errors import EyasError


def sample(ids=(1, 2, 3), mask=(False, True, True), **more) -> Sample:
    fields = {"id": "a", "split": "train", "category": None, "prompt_ids": np.array([1], np.int32)} | more
    return Sample(token_ids=np.array(ids, np.int32), loss_mask=np.array(mask, np.bool_), **fields)


IDS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=20)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(IDS.filter(lambda rows: any(m for _, m in rows)), max_size=5))
def test_what_is_written_is_read(tmp_path, rows):
    written = [
        sample([i for i, _ in r], [m for _, m in r], id=str(k), split=("train", "heldout")[k % 2], row=k)
        for k, r in enumerate(rows)
    ]
    path = tmp_path / "samples.parquet"
    write_samples(path, iter(written), {"supervise": "all_turns"})
    assert read_metadata(path)["supervise"] == "all_turns"
    found = read_samples(path)
    assert [(s.id, s.split, s.category, s.row) for s in found] == [
        (s.id, s.split, s.category, s.row) for s in written
    ]
    for a, b in zip(found, written, strict=True):
        assert a.token_ids.dtype == np.int32
        assert a.loss_mask.dtype == np.bool_
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.loss_mask, b.loss_mask)
        assert np.array_equal(a.prompt_ids, b.prompt_ids)
    assert [s.id for s in read_samples(path, "heldout")] == [s.id for s in written if s.split == "heldout"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mask": (True, False)}, "3 token ids, but 2 loss mask entries"),
        ({"mask": (False, False, False)}, "expected a supervised token, found none among 3"),
        ({"ids": (1, -2, 3)}, "least token id -2"),
        ({"split": "test"}, "split 'test'"),
        ({"prompt_ids": np.array([1])}, "prompt_ids: expected 1-D int32, found 1-D int64"),
    ],
)
def test_a_wrong_sample_is_refused_by_name(fields, said):
    with pytest.raises(EyasError, match=f"sample a: .*{said}"):
        sample(**fields)


def test_files_of_others_and_broken_files_are_refused(tmp_path):
    path = tmp_path / "samples.parquet"
    pq.write_table(pa.table({"id": ["a"]}), path)
    with pytest.raises(EyasError, match=r"samples\.parquet: expected format eyas-samples-1, found None"):
        read_samples(path)
    write_samples(path, [sample()], {})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EyasError, match=r"samples\.parquet: not a readable samples file"):
        read_samples(path)


def test_a_failure_while_writing_leaves_no_file(tmp_path):
    def broken():
        yield sample()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_samples(tmp_path / "samples.parquet", broken(), {})
    assert list(tmp_path.iterdir()) == []
