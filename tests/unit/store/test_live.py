"""Runs that are still being written, or were until something ended it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gradaudit.errors import RunCorrupt
from gradaudit.store import open_run
from gradaudit.store.host import host_id
from gradaudit.store.reader import STALE_S
from gradaudit.store.writer import MERGE_FANIN, RunWriter
from tests.factory import meta, step, write_run

REPOSITORY = Path(__file__).parents[3]


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
    with pytest.raises(RunCorrupt, match=f"{folder}.* keeps changing while it is read; try again in a moment"):
        len(open_run(folder).steps)


def test_the_version_changes_with_every_flush_and_not_without(tmp_path: Path) -> None:
    writer = written(tmp_path / "run", 1)
    run = open_run(tmp_path / "run")
    before = run.version
    assert run.version == before
    writer.append("steps", [step(1)])
    writer.flush()
    assert run.version != before
    assert len(run.rank_steps(0)) == 2


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


def test_a_reader_that_has_a_part_open_goes_on_reading_it_while_parts_are_merged(tmp_path: Path) -> None:
    writer = written(tmp_path / "run", MERGE_FANIN - 1)
    first = tmp_path / "run" / "rank-00000" / "steps-000000.parquet"
    with first.open("rb") as opened:
        writer.append("steps", [step(MERGE_FANIN - 1)])
        writer.flush()
        assert pq.read_table(opened)["step"].to_pylist() == [0]
    assert pq.read_table(first)["step"].to_pylist() == list(range(MERGE_FANIN))
