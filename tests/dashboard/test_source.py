from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from gradaudit.errors import GradauditError, RunNotFound
from gradaudit.store.writer import RunWriter
from gradaudit_dashboard.source import RECHECK_S, STALLED_S, Source, row_names
from tests import factory
from tests.dashboard import runs

RUNNING = {"ended": None, "host": "elsewhere"}


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def live(path: Path, **more: object) -> RunWriter:
    run_meta = factory.meta(runs.blocks(1), **{**RUNNING, "heartbeat_at": time.time(), **more})
    return RunWriter(path, rank=0, meta=run_meta)


def add_step(writer: RunWriter, index: int) -> None:
    writer.append("steps", [factory.step(index)])
    writer.append("samples", [runs.recorded(index, 0, -14.0, 65536.0)])
    writer.flush()


def test_runs_are_named_by_their_path_below_the_root(tmp_path: Path) -> None:
    runs.one_step(tmp_path / "a")
    runs.one_step(tmp_path / "exp" / "b")

    assert set(Source(tmp_path).names()) == {"a", "exp/b"}
    assert Source(tmp_path / "a").names() == ["a"]
    assert Source(tmp_path / "a").only_name() == "a"
    assert Source(tmp_path).only_name() is None


@pytest.mark.parametrize(
    "name",
    [
        "..", "../a", "a/..", "a/../a", "", ".", "/", "//", "a//b", "a/b/c", "/etc/passwd", "~", ".ssh", "a\x00",
        "a\\b", "C:", "x" * 300, "rank-00000", "a/rank-00000", "outside", "nope",
    ],
)  # fmt: skip
def test_a_name_that_is_not_a_run_inside_the_root_leads_nowhere(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    runs.one_step(root / "a")
    runs.one_step(tmp_path / "secret")
    (root / "outside").symlink_to(tmp_path / "secret")

    source = Source(root)

    assert source.path_of(name) is None
    assert source.names() == ["a"]
    with pytest.raises(RunNotFound):
        source.load(name)


def test_a_run_is_opened_once_and_again_only_when_it_changed(tmp_path: Path) -> None:
    clock = Clock()
    source = Source(tmp_path, clock=clock)
    writer = live(tmp_path / "a")
    add_step(writer, 0)
    first = source.load("a")

    assert source.load("a") is first
    assert first.last_step == 0

    add_step(writer, 1)
    clock.now += RECHECK_S
    second = source.load("a")

    assert second.key != first.key
    assert (first.last_step, second.last_step) == (0, 1)


def test_a_heartbeat_alone_refreshes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    source = Source(tmp_path, clock=clock)
    writer = live(tmp_path / "a")
    add_step(writer, 0)
    first = source.load("a")

    writer.meta["heartbeat_at"] += 10.0
    writer.write_meta()
    clock.now += RECHECK_S

    assert source.load("a") is first


def test_a_live_run_is_not_analysed_again_before_it_had_the_cpu_for_a_while(tmp_path: Path) -> None:
    clock = Clock()
    source = Source(tmp_path, clock=clock)
    writer = live(tmp_path / "a")
    add_step(writer, 0)
    first = source.load("a")
    first.cost_s = 10.0
    add_step(writer, 1)

    clock.now += 39.0
    assert source.load("a") is first
    clock.now += 2.0
    assert source.load("a") is not first


def test_a_killed_writer_is_noticed_although_no_file_changes(tmp_path: Path) -> None:
    clock = Clock()
    source = Source(tmp_path, clock=clock)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    from gradaudit.store.reader import host_id

    add_step(live(tmp_path / "a", host=host_id(), pid=child), 0)
    assert source.status(source.load("a")).text == "live, step 0"

    os.kill(child, 9)
    os.waitpid(child, 0)
    clock.now += RECHECK_S

    assert source.status(source.load("a")).text == "killed at step 0"


def test_a_live_run_that_writes_nothing_is_called_stalled(tmp_path: Path) -> None:
    clock = Clock()
    source = Source(tmp_path, clock=clock)
    add_step(live(tmp_path / "a"), 0)

    assert source.status(source.load("a")).state == "live"
    clock.now += STALLED_S + 35
    status = source.status(source.load("a"))

    assert status.state == "stalled"
    assert "nothing new for 9" in status.text


@pytest.mark.parametrize(
    ("ended", "text"),
    [("ok", "ended at step 0"), ("exception", "ended by an exception at step 0"), ("killed", "killed at step 0")],
)
def test_the_badge_says_how_a_run_ended(tmp_path: Path, ended: str, text: str) -> None:
    runs.training(tmp_path / "a", layers=1, num_steps=1, ended=ended)
    source = Source(tmp_path)

    assert source.status(source.load("a")).text == text


def test_a_broken_run_stays_in_the_list_and_breaks_no_other(tmp_path: Path) -> None:
    runs.one_step(tmp_path / "good")
    runs.broken(tmp_path / "bad")
    runs.torn(tmp_path / "torn")

    source = Source(tmp_path)
    rows = {row.name: row for row in source.rows(budget_s=30)}
    rows = {row.name: row for row in source.rows(budget_s=30)}

    assert "run.json cannot be read" in rows["bad"].problem
    assert "samples-000000.parquet cannot be read" in rows["torn"].problem
    assert rows["good"].problem == ""
    assert rows["good"].level is not None
    assert (rows["good"].num_steps, rows["good"].scale_last) == (1, 65536.0)


def test_verdicts_of_the_list_are_worked_out_bit_by_bit(tmp_path: Path) -> None:
    for name in "abc":
        runs.one_step(tmp_path / name)
    source = Source(tmp_path)

    counts = [sum(row.level is not None for row in source.rows(budget_s=budget)) for budget in (0, 1e-9, 1e-9, 30)]

    assert counts == [0, 1, 2, 3]


def test_few_runs_are_kept_in_memory(tmp_path: Path) -> None:
    for name in "abcdef":
        runs.one_step(tmp_path / name)
    source = Source(tmp_path)
    first = source.load("a")
    for name in "bcdef":
        source.load(name)

    assert source.load("a") is not first


def test_a_run_that_vanishes_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    runs.one_step(tmp_path / "a")
    source = Source(tmp_path)
    source.load("a")
    shutil.rmtree(tmp_path / "a")

    with pytest.raises(GradauditError, match="There is no run called a"):
        source.load("a")
    assert source.names() == []


def test_rows_of_the_same_name_get_numbers(tmp_path: Path) -> None:
    runs.hostile(tmp_path / "a")
    names = row_names(Source(tmp_path).load("a").analysis)

    assert len(set(names.values())) == 5
    assert names[1] == f"{runs.HOSTILE} #2"
    assert names[2] == "tensor 2"
