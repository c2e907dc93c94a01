import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.data.conversation import parse
from eyas.data.read import read_rows
from eyas.errors import EyasError, UsageError

ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def test_a_broken_line_is_a_bad_row_with_its_number_and_the_rest_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b'\n{"messages": [}\n\n[1]\n\xff\xfe\n' + json.dumps(ROW).encode())
    rows = list(read_rows([str(path)]))
    assert [(r.number, r.value is not None) for r in rows] == [
        (1, True),
        (2, False),
        (4, False),
        (5, False),
        (6, True),
    ]
    assert "column 15" in str(rows[1].error)
    assert rows[2].error == "expected an object, found list"
    assert "'utf-8' codec can't decode byte 0xff" in str(rows[3].error)


def test_half_a_surrogate_pair_is_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}\n{"id": "\\ud83d\\ude00"}'
    )
    bad, good = read_rows([str(tmp_path / "a.jsonl")])
    assert "surrogate" in str(bad.error)
    assert good.value == {"id": "😀"}


def test_rows_are_read_one_by_one_without_guessing_a_column_type(tmp_path):
    path = tmp_path / "a.jsonl"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    late = {"messages": [ROW["messages"][0], call], "meta": [1, "a"]}
    early = {"messages": [ROW["messages"][0], ROW["messages"][1] | {"tool_calls": None}], "meta": {"a": 1}}
    path.write_text("".join(json.dumps(r) + "\n" for r in [early] * 1000 + [late]))
    parsed = [parse(r.value) for r in read_rows([str(path)]) if r.value]
    assert len(parsed) == 1001
    assert "tool_calls" not in parsed[0].messages[1]
    assert parsed[-1].messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_json_lists_parquet_and_globs_give_the_same_rows(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([ROW, ROW]))
    pq.write_table(pa.Table.from_pylist([ROW, ROW]), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl").write_text(json.dumps(ROW) + "\n")
    rows = list(read_rows([str(tmp_path / "*")]))
    assert [(r.file.rsplit("/", 1)[1], r.number) for r in rows] == [
        ("a.json", 1),
        ("a.json", 2),
        ("b.parquet", 1),
        ("b.parquet", 2),
        ("c.jsonl", 1),
    ]
    assert {parse(r.value).id for r in rows if r.value} == {parse(ROW).id}


def test_parquet_nulls_count_as_absent_fields(tmp_path):
    turns = [{"from": "human", "value": "hi", "tool_call_id": None}, {"from": "gpt", "value": "yes", "role": None}]
    pq.write_table(pa.Table.from_pylist([{"conversations": turns, "messages": None}]), tmp_path / "a.parquet")
    (row,) = read_rows([str(tmp_path / "a.parquet")])
    assert row.value
    assert parse(row.value).messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        ("a.txt", "x", UsageError, "unknown kind"),
        ("a.json", '{"a": 1}', EyasError, "expected a list of rows, found dict"),
        ("a.json", '[{"a": 1},\n]', EyasError, "line 2"),
        ("a.parquet", "PAR1 no", EyasError, "not readable as Parquet"),
    ],
)
def test_a_file_broken_as_a_whole_is_an_error_that_names_it(tmp_path, name, content, kind, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(kind, match=said) as e:
        list(read_rows([str(tmp_path / name)]))
    assert name in str(e.value)


def test_a_missing_file_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="matches no file"):
        list(read_rows([str(tmp_path / "none.jsonl")]))
