"""Opening runs that are whole, half written, being written, foreign or broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gradaudit.errors import GradauditError, RunCorrupt, RunNotFound, SchemaMismatch
from gradaudit.schema import SCHEMA_VERSION, TABLES
from gradaudit.store import find_runs, is_run, open_run, reader
from gradaudit.store.reader import run_version
from gradaudit.store.writer import RunWriter
from tests.factory import meta, op, sample, step, tensor, write_run

REPOSITORY = Path(__file__).parents[3]


def one_sentence(error: pytest.ExceptionInfo[GradauditError], path: Path) -> None:
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    assert text.endswith(".") or ": gradaudit run" in text
    assert len(text) < 400


# what is no run


def test_nothing_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="does not exist; record a run with") as error:
        open_run(tmp_path / "missing")
    one_sentence(error, tmp_path / "missing")


def test_a_folder_without_a_run_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="is not a gradaudit run") as error:
        open_run(tmp_path)
    one_sentence(error, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunNotFound, match="is not a gradaudit run"):
        open_run(tmp_path / "file")


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "something"}', "3", "null"])
def test_somebody_elses_run_json_is_not_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunNotFound, match="was not written by gradaudit") as error:
        open_run(tmp_path)
    one_sentence(error, tmp_path / "run.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"format": "gradaudit-run", "schema_ver'])
def test_a_broken_run_json_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RunCorrupt, match="cannot be read") as error:
        open_run(tmp_path)
    one_sentence(error, tmp_path / "run.json")


@pytest.mark.parametrize(
    "tensors", [[{"fqn": "no id"}], ["text"], [None], {"id": 0}, [{"id": 0, "kind": "x", "fqn": "a", "shape": 3}]]
)
def test_a_tensors_table_that_is_none_is_corrupt(tmp_path: Path, tensors: Any) -> None:
    write_run(tmp_path / "run", run_meta={**meta(), "tensors": tensors})
    with pytest.raises(RunCorrupt, match="tensors table") as error:
        open_run(tmp_path / "run").tensors()
    one_sentence(error, tmp_path / "run")


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, "2", None])
def test_a_newer_schema_asks_for_a_newer_gradaudit(tmp_path: Path, version: Any) -> None:
    write_run(tmp_path / "run", run_meta=meta(schema_version=version))
    with pytest.raises(SchemaMismatch, match=r"newer gradaudit .*; upgrade gradaudit") as error:
        open_run(tmp_path / "run")
    one_sentence(error, tmp_path / "run")


def test_an_empty_run_is_a_valid_one(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", rank=0, meta=meta())
    run = open_run(tmp_path / "run")
    assert len(run.steps) == 0
    assert len(run.samples()) == 0
    assert run.events() == []
    assert run.tensors() == ()
    assert run.ranks == (0,)
    rows, amax = run.steps.param_matrix(0)
    assert rows.shape == (0,)
    assert amax.shape == (0, 0)


def test_fields_that_are_not_known_yet_are_passed_over(tmp_path: Path) -> None:
    tensors = [{**tensor(0, "a"), "colour": "red"}, {"id": 1, "kind": "param_grad", "fqn": "b"}]
    run = open_run(write_run(tmp_path / "run", run_meta={**meta(), "tensors": tensors, "news": 1}))
    assert [info.fqn for info in run.tensors()] == ["a", "b"]
    assert run.tensors()[1].dtype == "float32"


def test_a_column_added_since_is_unknown_in_an_older_run_and_a_newer_one_is_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=[step(0)], samples=[sample(0, 0, {0: 1}, noise_gain=2.0)])
    (file,) = folder.rglob("samples-*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["noise_gain"]).append_column("new", pa.array(["x"])), file)
    assert open_run(folder).samples().noise_gain.tolist() != [2.0]
    assert open_run(folder).samples().numel.tolist() == [1]


# broken parts


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.95, 0.999])
@pytest.mark.parametrize("table", TABLES)
def test_a_truncated_part_is_corrupt_and_named(tmp_path: Path, table: str, share: float) -> None:
    events = [{"seq": i, "step": i, "micro_step": 0, "name": "backward"} for i in range(50)]
    folder = write_run(
        tmp_path / "run",
        steps=[step(i) for i in range(50)],
        samples=[sample(i, 0, {0: 1}) for i in range(50)],
        events=events,
        ops=[op(i, "mul.Tensor") for i in range(50)],
    )
    (file,) = folder.rglob(f"{table}-*.parquet")
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(RunCorrupt, match=r"cannot be read .*; remove it or record the run again") as error:
        read_all(folder, table)
    one_sentence(error, file)


def read_all(folder: Path, table: str) -> Any:
    run = open_run(folder)
    return {"steps": lambda: run.steps, "samples": run.samples, "events": run.events, "ops": run.ops}[table]()


@pytest.mark.parametrize("seed", range(20))
def test_a_scrambled_part_is_corrupt_or_readable_but_never_another_error(tmp_path: Path, seed: int) -> None:
    import random

    folder = write_run(
        tmp_path / "run", steps=[step(i) for i in range(40)], samples=[sample(i, 0, {0: 1}) for i in range(40)]
    )
    chance = random.Random(seed)
    for table in ("steps", "samples"):
        (file,) = folder.rglob(f"{table}-*.parquet")
        data = bytearray(file.read_bytes())
        for _ in range(20):
            data[chance.randrange(len(data))] = chance.randrange(256)
        file.write_bytes(data)
        try:
            read_all(folder, table)
        except RunCorrupt as error:
            assert str(file) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "foreign",
    [
        pa.table({"x": [1, 2]}),
        pa.table({name: pa.array(["text"]) for name in TABLES["steps"].names}),
        pa.table({name: pa.array([[1]]) for name in TABLES["steps"].names}),
        pa.table({}),
    ],
    ids=["other columns", "other types", "lists", "no column"],
)
def test_a_foreign_part_is_corrupt_and_named(tmp_path: Path, foreign: pa.Table) -> None:
    folder = write_run(tmp_path / "run", steps=[step(0)])
    (file,) = folder.rglob("steps-*.parquet")
    pq.write_table(foreign, file)
    with pytest.raises(RunCorrupt) as error:
        read_all(folder, "steps")
    one_sentence(error, file)


def test_files_that_are_no_parts_are_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=[step(0)])
    (folder / "rank-00000" / "steps-copy.parquet").write_bytes(b"x")
    (folder / "rank-00000" / ".steps-000001.parquet.tmp").write_bytes(b"x")
    (folder / "rank-notes.txt").write_text("x")
    run = open_run(folder)
    assert len(run.steps) == 1
    assert run.ranks == (0,)
    assert run_version(folder)


# finding runs, and what opening one needs


def test_runs_are_found_two_levels_deep_newest_first(tmp_path: Path) -> None:
    for i, name in enumerate(("a", "group/b", "group/c", "x/y/too-deep")):
        folder = write_run(tmp_path / name)
        os.utime(folder / "run.json", (i, i))
        (folder / "rank-00001").mkdir()
        (folder / "rank-00001" / "run.json").write_text("{}")
    assert find_runs(tmp_path) == [tmp_path / "group/c", tmp_path / "group/b", tmp_path / "a"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert find_runs(tmp_path / "missing") == []
    assert is_run(tmp_path / "a")
    assert not is_run(tmp_path)


def imports(code: str) -> set[str]:
    code += "\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return set(done.stdout.split())


def test_opening_and_reading_a_run_never_imports_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", run_meta=meta([tensor(0, "a")]), steps=[step(0)], samples=[sample(0, 0, {0: 1})])
    read = (
        f"import gradaudit\nrun = gradaudit.open_run({str(tmp_path / 'run')!r})\nrun.steps, run.samples(), run.events()"
    )
    loaded = imports(read)
    assert "torch" not in loaded
    assert "pyarrow" in loaded


def test_the_test_above_would_notice_torch() -> None:
    assert "torch" in imports("import sys, types\nsys.modules['torch'] = types.ModuleType('torch')")


def test_a_rank_of_its_own_is_described_by_its_own_file(tmp_path: Path) -> None:
    write_run(tmp_path / "run", run_meta=meta([tensor(0, "a")]))
    RunWriter(tmp_path / "run", rank=1, meta=meta([tensor(0, "b")], rank=1))
    run = open_run(tmp_path / "run")
    assert run.ranks == (0, 1)
    assert [run.tensors(rank)[0].fqn for rank in run.ranks] == ["a", "b"]
    (tmp_path / "run" / "rank-00001" / "run.json").write_text(json.dumps({"format": "x"}))
    with pytest.raises(RunNotFound):
        run.tensors(1)


def test_no_error_of_the_readers_comes_without_its_class() -> None:
    assert {RunNotFound, RunCorrupt, SchemaMismatch} <= set(GradauditError.__subclasses__())
    assert reader.RunCorrupt is RunCorrupt
