"""What the writer was given is what the reader gives back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradaudit.formats import NUM_BINS
from gradaudit.schema import TABLES
from gradaudit.store import open_run, reader
from gradaudit.store.tables import NO_GRADIENT, only
from gradaudit.store.writer import LAST_KEY, MERGE_FANIN, RunWriter
from tests.factory import meta, sample, step, tensor, write_run

QUICK = settings(max_examples=40, deadline=None, derandomize=True)

INT64 = st.integers(-(2**62), 2**62)
COUNT = st.integers(0, 2**31 - 1)
FLOAT32 = st.floats(width=32)


def rows_of(table: str) -> st.SearchStrategy[dict[str, Any]]:
    """Rows with every value a column can hold, nulls where they are allowed."""
    columns = {}
    for field in TABLES[table]:
        kind = field.type
        if pa.types.is_list(kind):
            values: Any = st.lists(FLOAT32 if pa.types.is_floating(kind.value_type) else COUNT, max_size=5)
            if field.name == "counts":
                values = st.lists(COUNT, min_size=NUM_BINS, max_size=NUM_BINS)
        elif pa.types.is_boolean(kind):
            values = st.booleans()
        elif pa.types.is_floating(kind):
            values = st.floats()
        elif pa.types.is_string(kind):
            values = st.text(max_size=10)
        else:
            values = COUNT if kind == pa.int32() else INT64
        columns[field.name] = st.none() | values if field.nullable else values
    return st.fixed_dictionaries(columns)


def same(given: Any, read: Any) -> bool:
    if given is None:
        return read is None or read == -1 or (isinstance(read, float) and math.isnan(read))
    if isinstance(given, float):
        return math.isnan(read) if math.isnan(given) else given == read
    return bool(given == read)


@pytest.mark.parametrize("table", TABLES)
def test_rows_come_back_as_they_were_given(table: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @QUICK
    @given(st.lists(rows_of(table), min_size=1, max_size=12), st.integers(1, 5))
    def check(rows: list[dict[str, Any]], chunk: int) -> None:
        # one row each, told apart by what they are sorted by
        key = "seq" if table == "events" else "order" if table == "ops" else "step"
        for i, row in enumerate(rows):
            row[key] = i
            if table == "samples":
                row["tensor"] = 0
            if table == "ops":
                row["step"] = 0
        folder = tmp_path_factory.mktemp("run") / "run"
        writer = RunWriter(folder, rank=0, meta=meta())
        for start in range(0, len(rows), chunk):
            writer.append(table, rows[start : start + chunk])
            writer.flush()
        assert writer.num_pending_rows == 0
        run = open_run(folder)
        if table == "events":
            read: Any = run.events()
            assert [set(row) for row in read] == [set(TABLES[table].names)] * len(rows)
        elif table == "ops":
            read = [{name: getattr(row, name) for name in TABLES[table].names} for row in run.ops()]
        else:
            columns = run.steps if table == "steps" else run.samples()
            names = [field.name for field in TABLES[table] if hasattr(columns, field.name)]
            read = [{name: plain(getattr(columns, name)[i]) for name in names} for i in range(len(columns))]
        for row, back in zip(rows, read, strict=True):
            for name, value in back.items():
                expected = row[name]
                if isinstance(expected, list) or name == "counts":
                    expected = [0] * NUM_BINS if expected is None else expected
                    assert len(expected) == len(value)
                    assert all(same(a, b) for a, b in zip(expected, value, strict=True))
                else:
                    assert same(expected, value), name

    check()


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def test_unknown_is_told_from_false_and_missing_from_zero(tmp_path: Path) -> None:
    steps = [step(0, found_inf=None, loss=None, scaler=None), step(1, found_inf=True, param_amax=[None, 0.0, math.inf])]
    run = open_run(write_run(tmp_path / "run", steps=steps))
    assert run.steps.found_inf.tolist() == [-1, 1]
    assert run.steps.scaler.tolist() == [-1, 0]
    assert math.isnan(run.steps.loss[0])
    rows, amax = run.steps.param_matrix(0)
    assert rows.tolist() == [0, 1]
    assert amax.tolist() == [[NO_GRADIENT] * 3, [NO_GRADIENT, 0.0, math.inf]]


@pytest.mark.parametrize("num_flushes", [1, MERGE_FANIN - 1, MERGE_FANIN, MERGE_FANIN + 1, 70, 600])
def test_merging_parts_keeps_every_row_exactly_once(tmp_path: Path, num_flushes: int) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta([tensor(0, "a"), tensor(1, "b")]))
    for i in range(num_flushes):
        writer.append("steps", [step(2 * i), step(2 * i + 1)])
        writer.append("samples", [sample(i, 1, {0: i + 1}), sample(i, 0, {0: i + 1})])
        writer.append("events", [{"seq": i, "step": i, "micro_step": 0, "name": "backward"}])
        writer.flush()
    run = open_run(tmp_path / "run")
    assert run.steps.step.tolist() == list(range(2 * num_flushes))
    samples = run.samples()
    assert samples.tensor.tolist() == [0] * num_flushes + [1] * num_flushes
    assert samples.step.tolist() == list(range(num_flushes)) * 2
    assert samples.numel.tolist() == [i + 1 for i in range(num_flushes)] * 2
    assert [event["seq"] for event in run.events()] == list(range(num_flushes))
    parts = list((tmp_path / "run" / "rank-00000").glob("steps-*.parquet"))
    assert len(parts) <= MERGE_FANIN * 4
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_large_parts_are_left_alone_and_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradaudit.store.writer.MAX_MERGED_ROWS", 20)
    run = open_run(write_run(tmp_path / "run", steps=[step(i) for i in range(200)], flush_every=2))
    assert run.steps.step.tolist() == list(range(200))
    parts = [pq.read_metadata(file).num_rows for file in (tmp_path / "run").rglob("steps-*.parquet")]
    assert max(parts) <= 20


def test_inside_a_part_samples_are_sorted_by_tensor_and_step(tmp_path: Path) -> None:
    rows = [sample(i, t, {0: 1}) for i in range(5) for t in (2, 0, 1)]
    write_run(tmp_path / "run", samples=rows, steps=[step(i) for i in range(5)])
    (file,) = (tmp_path / "run").rglob("samples-*.parquet")
    table = pq.read_table(file)
    assert list(zip(table["tensor"].to_pylist(), table["step"].to_pylist(), strict=True)) == sorted(
        (row["tensor"], row["step"]) for row in rows
    )
    assert pq.read_schema(file).metadata[LAST_KEY] == b"0"


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A run of 4 tensors and 3,000 steps, in row groups of one tensor each."""
    folder = tmp_path / "run"
    writer = RunWriter(folder, rank=0, meta=meta([tensor(i, f"layer.{i}") for i in range(4)]))
    writer.append("samples", [sample(i, t, {0: t + 1}) for t in range(4) for i in range(3000)])
    writer.flush()
    return folder


def test_filters_give_the_rows_asked_for(many: Path) -> None:
    run = open_run(many)
    assert len(run.samples()) == 12_000
    some = run.samples(tensors=[3, 1], steps=(10, 12))
    assert some.tensor.tolist() == [1, 1, 1, 3, 3, 3]
    assert some.step.tolist() == [10, 11, 12] * 2
    assert some.counts.sum(axis=1).tolist() == [2, 2, 2, 4, 4, 4]
    assert len(run.samples(tensors=[])) == 0
    assert len(run.samples(tensors=[99])) == 0
    assert len(run.samples(steps=(5, 4))) == 0
    assert len(run.samples(steps=(2999, 10**9))) == 4


def test_asking_for_a_tensor_reads_its_row_groups_only(many: Path) -> None:
    (file,) = many.rglob("samples-*.parquet")
    metadata = pq.read_metadata(file)
    assert metadata.num_row_groups == 3
    last = metadata.row_group(2)
    assert last.column(1).statistics.min == 2  # holds tensors 2 and 3
    data = bytearray(file.read_bytes())
    for i in range(last.num_columns):
        column = last.column(i)
        start = column.dictionary_page_offset or column.data_page_offset
        data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(data)

    assert len(open_run(many).samples(tensors=[0])) == 3000
    with pytest.raises(reader.RunCorrupt):
        open_run(many).samples(tensors=[3])


def test_samples_can_be_selected_by_kind(tmp_path: Path) -> None:
    tensors = [tensor(0, "a"), tensor(1, "a.weight", "param_grad"), tensor(2, "a", "output")]
    samples = [sample(0, 0, {0: 1}), sample(0, 1, {1: 2}), sample(0, 2, {}, counts=None)]
    run = open_run(write_run(tmp_path / "run", run_meta=meta(tensors), steps=[step(0)], samples=samples))
    assert only(run.samples(), run.tensors(), ("output_grad", "param_grad")).tensor.tolist() == [0, 1]
    assert len(only(run.samples(tensors=[]), run.tensors(), ("output",))) == 0
    assert run.samples().counts[2].sum() == 0


def test_what_waits_for_the_next_flush_is_counted(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta())
    writer.append("samples", [sample(0, 0, {1: 2}), sample(1, 0, {2: 3})])
    assert writer.num_pending_rows == 2
    writer.flush()
    assert open_run(tmp_path / "run").samples().numel.tolist() == [2, 3]


def test_anybody_can_query_a_run_with_duckdb(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = RunWriter(tmp_path / "run", rank=rank, meta=meta([tensor(0, "a")]))
        writer.append("samples", [sample(i, 0, {-3: 4}, num_zero=rank) for i in range(20)])
        writer.append("steps", [step(i, param_amax=[0.5, None]) for i in range(20)])
        writer.flush()
    samples = duckdb.sql(
        f"select count(*), sum(num_zero), max(counts[62]) from '{tmp_path}/run/rank-*/samples-*.parquet'"
    )
    assert samples.fetchall() == [(40, 20, 4)]
    steps = duckdb.sql(f"select max(param_amax[1]), count(param_amax[2]) from '{tmp_path}/run/rank-*/steps-*.parquet'")
    assert steps.fetchall() == [(0.5, 0)]
