"""Opening runs that are whole, half written, being written, foreign or broken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gradaudit.errors import GradauditError, RunCorrupt, RunNotFound, SchemaMismatch
from gradaudit.schema import SCHEMA_VERSION, TABLES
from gradaudit.store import find_runs, is_run, open_run, reader
from gradaudit.store.host import host_id
from gradaudit.store.reader import STALE_S, run_version
from gradaudit.store.writer import MERGE_FANIN, RunWriter
from tests.factory import meta, sample, step, tensor, write_run

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
    with pytest.raises(SchemaMismatch, match="newer gradaudit .*; upgrade gradaudit") as error:
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
    )
    (file,) = folder.rglob(f"{table}-*.parquet")
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(RunCorrupt, match="cannot be read .*; remove it or record the run again") as error:
        read_all(folder, table)
    one_sentence(error, file)


def read_all(folder: Path, table: str) -> Any:
    run = open_run(folder)
    return {"steps": lambda: run.steps, "samples": run.samples, "events": run.events}[table]()


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


# while it is being written


def written(folder: Path, num_flushes: int) -> RunWriter:
    writer = RunWriter(folder, rank=0, meta=meta())
    for i in range(num_flushes):
        writer.append("steps", [step(i)])
        writer.flush()
    return writer


def test_parts_merged_between_listing_and_opening_are_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = written(tmp_path / "run", MERGE_FANIN - 1)
    glob, num_listings = Path.glob, []

    def then_merge(self: Path, pattern: str) -> Any:
        found = sorted(glob(self, pattern))
        if pattern.startswith("steps"):
            num_listings.append(1)
            if len(num_listings) == 1:
                writer.append("steps", [step(MERGE_FANIN - 1)])
                found = found[1:]  # those that are about to go
                writer.flush()
        return iter(found)

    monkeypatch.setattr(Path, "glob", then_merge)
    assert open_run(tmp_path / "run").steps.step.tolist() == list(range(MERGE_FANIN))
    assert len(num_listings) == 2


@pytest.mark.parametrize("opened_before", [1, 3, MERGE_FANIN])
def test_a_merge_while_parts_are_opened_one_by_one_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened_before: int
) -> None:
    """The old parts are still there when the merged one has taken the first one's place."""
    folder = tmp_path / "run"
    writer = written(folder, MERGE_FANIN - 1)
    kept = tmp_path / "kept"
    shutil.copytree(folder / "rank-00000", kept)
    writer.append("steps", [step(MERGE_FANIN - 1)])
    shutil.copy(next(iter((folder / "rank-00000").glob("steps-*.parquet"))), tmp_path / "first")
    writer.flush()  # merges
    (merged,) = (folder / "rank-00000").glob("steps-*.parquet")
    shutil.move(merged, tmp_path / "merged.parquet")
    for file in kept.iterdir():
        shutil.copy(file, folder / "rank-00000")

    read_table, num_reads = pq.read_table, []

    def replaced_meanwhile(*args: Any, **kwargs: Any) -> Any:
        num_reads.append(1)
        if len(num_reads) == opened_before:
            shutil.copy(tmp_path / "merged.parquet", tmp_path / "moving")
            os.replace(tmp_path / "moving", merged)
        return read_table(*args, **kwargs)

    monkeypatch.setattr(pq, "read_table", replaced_meanwhile)
    found = open_run(folder).steps.step.tolist()
    assert found == sorted(set(found))
    assert found[: MERGE_FANIN - 1] == list(range(MERGE_FANIN - 1))


def test_after_a_crash_between_merge_and_removal_no_row_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = written(tmp_path / "run", MERGE_FANIN - 1)
    writer.append("steps", [step(MERGE_FANIN - 1)])

    def crash(self: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", crash)
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    monkeypatch.undo()
    assert len(list((tmp_path / "run").rglob("steps-*.parquet"))) == MERGE_FANIN
    assert open_run(tmp_path / "run").steps.step.tolist() == list(range(MERGE_FANIN))


def test_parts_are_taken_in_the_order_of_their_numbers_beyond_a_million_too(tmp_path: Path) -> None:
    """A flush every two seconds comes that far in 23 days."""
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta())
    writer._next_index["steps"] = 10**6 - 3
    for i in range(MERGE_FANIN + 2):
        writer.append("steps", [step(i)])
        writer.flush()
    writer._next_index["steps"] = 2 * 10**6
    writer.append("steps", [step(100)])
    writer.flush()
    assert open_run(tmp_path / "run").steps.step.tolist() == [*range(MERGE_FANIN + 2), 100]


def test_a_folder_that_never_settles_is_given_up_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", steps=[step(0)])
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "steps-000009.parquet"]))
    with pytest.raises(RunCorrupt, match="keeps changing while it is read; try again in a moment") as error:
        read_all(folder, "steps")
    one_sentence(error, folder)


def test_the_version_changes_with_every_flush_and_not_without(tmp_path: Path) -> None:
    writer = written(tmp_path / "run", 1)
    run = open_run(tmp_path / "run")
    before = run.version
    assert run.version == before
    writer.append("steps", [step(1)])
    writer.flush()
    assert run.version != before
    assert len(run.rank_steps(0)) == 2


# how it ended


@pytest.mark.parametrize(
    ("host", "pid", "silence_s", "ended"),
    [
        ("here", "mine", 0.0, "running"),
        ("here", "gone", 0.0, "killed"),
        ("here", "mine", STALE_S + 5, "killed"),  # the number is another process's by now
        ("here", 0, 0.0, "killed"),
        ("here", -1, 0.0, "killed"),
        ("here", 2**70, 0.0, "killed"),
        ("here", 1, 0.0, "running"),  # root's, or ours
        ("elsewhere", "gone", STALE_S - 5, "running"),
        ("elsewhere", "mine", STALE_S + 5, "killed"),
    ],
)
def test_a_run_that_says_nothing_is_running_or_was_killed(
    tmp_path: Path, host: str, pid: Any, silence_s: float, ended: str
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    number = {"mine": os.getpid(), "gone": gone.pid}.get(pid, pid)
    name = host_id() if host == "here" else host
    run_meta = meta(ended=None, host=name, pid=number, heartbeat_at=time.time() - silence_s)
    assert open_run(write_run(tmp_path / "run", run_meta=run_meta)).ended == ended


@pytest.mark.parametrize("heartbeat", [None, "text", [], float(0)])
def test_a_heartbeat_that_is_none_means_it_is_over(tmp_path: Path, heartbeat: Any) -> None:
    run_meta = meta(ended=None, host="elsewhere", heartbeat_at=heartbeat)
    assert open_run(write_run(tmp_path / "run", run_meta=run_meta)).ended == "killed"


WRITER = """
import sys, time
from pathlib import Path
from gradaudit.store.host import host_id
from gradaudit.store.writer import RunWriter
from tests.factory import meta, sample, step, tensor
import os
run_meta = meta([tensor(0, "a")], ended=None, host=host_id(), pid=os.getpid(), heartbeat_at=time.time())
writer = RunWriter(Path(sys.argv[1]), rank=0, meta=run_meta)
i = 0
while True:
    for _ in range(5):
        writer.append("steps", [step(i)])
        writer.append("samples", [sample(i, 0, {0: 1})])
        i += 1
    writer.flush()
    print(i, flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.05, 0.21, 0.43])
def test_a_writer_killed_at_any_moment_leaves_a_readable_run(tmp_path: Path, delay_s: float) -> None:
    """What it said was flushed is there, each row once; a reader may look all the while."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        assert open_run(tmp_path / "run").ended == "running"
        deadline = time.monotonic() + delay_s
        while time.monotonic() < deadline:
            found = open_run(tmp_path / "run").steps.step.tolist()
            assert found == list(range(len(found)))
    finally:
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.stdout.read().split() if line]
        process.wait()
    run = open_run(tmp_path / "run")
    assert run.ended == "killed"
    flushed = said[-1] if said else 5
    for found in (run.steps.step, run.samples().step):
        assert found.tolist() == list(range(len(found)))
        assert flushed <= len(found) <= flushed + 5


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
