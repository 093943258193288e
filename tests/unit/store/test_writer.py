"""Claiming a folder, and what a flush leaves in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gradaudit.errors import CaptureError, RunExists
from gradaudit.store import open_run
from gradaudit.store.folders import default_folder
from gradaudit.store.host import host_id
from gradaudit.store.writer import RunWriter
from tests.factory import meta, sample, step, tensor, write_run


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=[step(0)])
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    with pytest.raises(RunExists, match=r"already holds a run; choose another folder with --out or pass --force\."):
        RunWriter(tmp_path / "run", rank=0, meta=meta())
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("leftover", ["run.json", "rank-00000/steps-000000.parquet"])
def test_the_rest_of_a_run_is_a_run_too(tmp_path: Path, leftover: str) -> None:
    (tmp_path / leftover).parent.mkdir(exist_ok=True)
    (tmp_path / leftover).write_text("x")
    with pytest.raises(RunExists):
        RunWriter(tmp_path, rank=0, meta=meta())


def test_a_folder_with_other_things_in_it_is_taken_and_they_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunWriter(tmp_path, rank=0, meta=meta(), force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_force_removes_the_old_run_whole(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", steps=[step(i) for i in range(50)], samples=[sample(0, 0, {0: 1})], flush_every=1
    )
    (folder / "rank-00000" / ".steps-000099.parquet.tmp").write_text("half a part")
    for rank in (1, 2, 3):
        writer = RunWriter(folder, rank=rank, meta=meta(rank=rank, world_size=4))
        writer.append("steps", [step(0)])
        writer.flush()
    (folder / "rank-00003" / "notes.txt").write_text("mine")

    writer = RunWriter(folder, rank=0, meta=meta(world_size=2), force=True)
    run = open_run(folder)
    assert len(run.steps) == 0
    assert len(run.samples()) == 0
    assert not list(folder.rglob("*.tmp"))
    # rank 1 is one of this run's and clears its own; 2 and 3 are an earlier run's
    assert sorted(entry.name for entry in folder.glob("rank-*")) == ["rank-00000", "rank-00001", "rank-00003"]
    assert [entry.name for entry in (folder / "rank-00003").iterdir()] == ["notes.txt"]
    second = RunWriter(folder, rank=1, meta=meta(rank=1, world_size=2), force=True)
    assert len(run.rank_steps(1)) == 0

    for w in (writer, second):
        w.append("steps", [step(7)])
        w.flush()
    assert [open_run(folder).rank_steps(rank).step.tolist() for rank in (0, 1)] == [[7], [7]]


def test_without_force_the_folders_of_other_ranks_are_not_touched(tmp_path: Path) -> None:
    early = RunWriter(tmp_path / "run", rank=5, meta=meta(rank=5))
    early.append("steps", [step(0)])
    early.flush()
    RunWriter(tmp_path / "run", rank=0, meta=meta())
    assert len(open_run(tmp_path / "run").rank_steps(5)) == 1


@pytest.mark.parametrize("blocked", ["file/run", "file"])
def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CaptureError, match=f"Cannot write the run to {tmp_path / blocked} .*; choose a writable folder"
    ):
        RunWriter(tmp_path / blocked, rank=0, meta=meta())


def test_nothing_half_written_has_a_parts_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta())
    write_table = pq.write_table

    def cut_off(table: Any, where: Any, **kwargs: Any) -> None:
        write_table(table, where, **kwargs)
        data = Path(where).read_bytes()
        Path(where).write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", cut_off)
    writer.append("steps", [step(0)])
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    assert len(open_run(tmp_path / "run").steps) == 0
    monkeypatch.undo()
    writer.flush()  # the rows were kept
    assert open_run(tmp_path / "run").steps.step.tolist() == [0]


def test_run_json_is_whole_at_every_moment_and_rewritten_only_when_it_changed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta())
    file = tmp_path / "run" / "run.json"
    inode = file.stat().st_ino
    writer.write_meta()
    assert file.stat().st_ino == inode
    writer.meta["ended"] = "exception"
    writer.write_meta()
    assert file.stat().st_ino != inode
    assert json.loads(file.read_text())["ended"] == "exception"


def test_names_of_any_script_survive_in_run_json(tmp_path: Path) -> None:
    names = ["слой.вес", "层", "a\u2028b", "\U0001f600", 'quote"\\', "surrogate\udcff"]
    write_run(tmp_path / "run", run_meta=meta([tensor(i, name) for i, name in enumerate(names)]))
    assert [info.fqn for info in open_run(tmp_path / "run").tensors()] == names


def test_a_host_is_known_by_a_digest_that_says_nothing_about_it() -> None:
    assert host_id() == host_id()
    assert len(host_id()) == 12
    assert set(host_id()) <= set("0123456789abcdef")


def test_a_run_nobody_named_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    first = default_folder("/elsewhere/train.py")
    assert first.parent == Path("gradaudit-runs")
    assert first.name.startswith("train-20")
    first.mkdir(parents=True)
    assert default_folder("/elsewhere/train.py") != first
    assert default_folder("").name.startswith("session-")


def test_several_ranks_have_to_be_told_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CaptureError, match="pass --out DIR"):
        default_folder("train.py")
