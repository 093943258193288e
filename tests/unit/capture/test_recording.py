"""Opening and closing a recording."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import gradaudit
from gradaudit.capture import recording
from gradaudit.errors import CaptureError, RunExists
from gradaudit.store import open_run
from tests.conftest import RECORDER, hooks_and_functions, is_ours
from tests.unit.capture.trainings import net, record, scaler, step


def test_a_second_recording_is_refused_while_the_first_is_open(tmp_path: Path) -> None:
    with gradaudit.attach(net(), out=tmp_path / "a"):
        with pytest.raises(CaptureError, match=f"already records to {tmp_path / 'a'}; close that recording first"):
            gradaudit.attach(net(), out=tmp_path / "b")
        assert not (tmp_path / "b").exists()
    with gradaudit.attach(net(), out=tmp_path / "b"):
        pass


def test_closing_twice_does_nothing_more(tmp_path: Path) -> None:
    audit = gradaudit.attach(net(), out=tmp_path / "run")
    audit.close()
    audit.close(ValueError())
    assert open_run(tmp_path / "run").ended == "ok"


def test_everything_that_was_put_on_torch_is_taken_off_again(tmp_path: Path) -> None:
    before = hooks_and_functions(torch)
    with gradaudit.attach(net(), out=tmp_path / "run"):
        assert sum(map(is_ours, hooks_and_functions(torch))) > 10
        assert RECORDER in [thread.name for thread in threading.enumerate()]
    after = hooks_and_functions(torch)
    assert [value for value in after if not any(value is other for other in before)] == []


def test_an_existing_run_is_refused_unless_forced(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record(tmp_path / "run", lambda: [step(model, optimizer) for _ in range(3)], model=model)
    with pytest.raises(RunExists, match=f"{tmp_path / 'run'} already holds a run; choose another folder"):
        gradaudit.attach(model, out=tmp_path / "run")
    assert len(open_run(tmp_path / "run").steps) == 3
    assert len(record(tmp_path / "run", lambda: step(model, optimizer), model=model, force=True).steps) == 1


def test_a_folder_that_cannot_be_made_is_a_capture_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CaptureError, match=r"Cannot write the run to .*file/run \(Not a directory\); choose a writable"
    ):
        gradaudit.attach(net(), out=tmp_path / "file" / "run")


@pytest.mark.parametrize("method", ["mkdir", "exists", "write_text"])
def test_a_folder_without_permission_is_a_capture_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def deny(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, method, deny)
    with pytest.raises(CaptureError, match=r"Cannot write the run to .*run \(Permission denied\); choose a writable"):
        gradaudit.attach(net(), out=tmp_path / "run")


@pytest.mark.parametrize("model", [None, "net", {}, torch.nn.Linear])
def test_what_is_no_module_is_refused_before_anything_is_opened(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ValueError, match=r"model is a .*; pass the torch.nn.Module that is trained"):
        gradaudit.attach(model, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_where_hooking_fails_nothing_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(auditor: Any) -> Any:
        raise AttributeError("this torch is different")

    monkeypatch.setattr(recording, "install", fail)
    with pytest.raises(AttributeError):
        gradaudit.attach(net(), out=tmp_path / "run")
    monkeypatch.undo()
    with gradaudit.attach(net(), out=tmp_path / "other"):
        pass


def test_an_optimizer_and_a_scaler_given_early_are_noted_before_their_first_use(tmp_path: Path) -> None:
    model = net()
    s = scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with gradaudit.attach(model, optimizer, s, out=tmp_path / "run"):
        pass
    meta = open_run(tmp_path / "run").meta
    assert meta["optimizers"][0] == {
        "id": 0, "class": "SGD", "params": [], "lr": 0.25, "resumed": False, "param_dtypes": [], "param_devices": [],
        "gradient_hooks": [], "eps": None,
        "fused": False, "state_dtypes": {}, "keeps_masters": False, "file": None, "line": None,
    }  # fmt: skip
    assert meta["scalers"][0]["init_scale"] == 256.0
    assert meta["scalers"][0]["fresh"]


def test_a_learning_rate_that_json_cannot_say_does_not_end_the_recording(tmp_path: Path) -> None:
    model = net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (float("nan"), torch.tensor(0.1))]
    run = record(tmp_path / "run", lambda: [step(model, o, i=1) for o in optimizers], model=model)
    assert [entry["lr"] for entry in run.meta["optimizers"]] == [None, None]


@pytest.mark.parametrize(
    ("error", "ended"),
    [(None, "ok"), (SystemExit(0), "ok"), (SystemExit(2), "exception"), (KeyboardInterrupt(), "exception")],
)
def test_how_a_training_ended_is_written_down(tmp_path: Path, error: BaseException | None, ended: str) -> None:
    gradaudit.attach(net(), out=tmp_path / "run").close(error)
    run = open_run(tmp_path / "run")
    assert run.ended == ended
    assert (run.meta["exception"] is None) == (ended == "ok")


def test_an_exception_is_told_with_the_users_line(tmp_path: Path) -> None:
    def train() -> None:
        torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError), gradaudit.attach(net(), out=tmp_path / "run"):
        train()
    exception = open_run(tmp_path / "run").meta["exception"]
    assert exception["type"] == "RuntimeError"
    assert exception["file"].endswith("test_recording.py")
    assert exception["line"] == train.__code__.co_firstlineno + 1


def test_a_recording_that_is_never_closed_is_closed_at_exit(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradaudit.attach(model, out=tmp_path / "run")
    step(model, optimizer)
    recording._at_exit()
    run = open_run(tmp_path / "run")
    assert run.ended == "ok"
    assert len(run.steps) == 1


SCRIPT = """
import torch, gradaudit
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
audit = gradaudit.attach(model, out={out!r})
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
raise OSError("disk on fire")
"""


def test_a_script_that_dies_without_closing_its_recording_leaves_a_whole_run(tmp_path: Path) -> None:
    script = SCRIPT.format(out=str(tmp_path / "run"))
    subprocess.run([sys.executable, "-c", script], check=False, stderr=subprocess.DEVNULL, timeout=120)
    run = open_run(tmp_path / "run")
    assert run.ended == "exception"
    assert run.meta["exception"]["message"] == "disk on fire"
    assert len(run.steps) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_forked_child_records_nothing_and_leaves_the_run_alone(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        step(model, optimizer)
        child = os.fork()
        if child == 0:
            try:
                step(model, optimizer)
                audit.close()
                os._exit(0 if not recording._attached else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        step(model, optimizer)

    with gradaudit.attach(model, out=tmp_path / "run") as audit:
        train()
    run = open_run(tmp_path / "run")
    assert len(run.steps) == 2
    assert run.ended == "ok"


def test_ranks_write_apart_and_only_the_first_describes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradaudit.attach(model, out=tmp_path / "run"):
            for _ in range(rank + 1):
                step(model, optimizer)
    run = open_run(tmp_path / "run")
    assert run.ranks == (0, 1)
    assert [len(run.rank_steps(rank)) for rank in run.ranks] == [1, 2]
    assert json.loads((tmp_path / "run" / "rank-00001" / "run.json").read_text())["rank"] == 1


def alive() -> Counter[str]:
    gc.collect()
    return Counter(str(type(value)) for value in gc.get_objects() if "gradaudit." in str(type(value)))


@pytest.mark.slow
def test_a_thousand_recordings_leak_nothing(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def cycle(i: int) -> None:
        with gradaudit.attach(model, optimizer, out=tmp_path / "run", force=True):
            if i % 50 == 0:
                step(model, optimizer, scaler())

    def state() -> tuple[Any, ...]:
        torch_state = [len(hooks) for hooks in hook_dicts()], len(warnings.filters)
        return alive(), threading.active_count(), len(os.listdir("/proc/self/fd")), torch_state

    for i in range(3):
        cycle(i)
    before = state()
    for i in range(1000):
        cycle(i)
    assert state() == before


def hook_dicts() -> list[Any]:
    module = torch.nn.modules.module
    return [value for name, value in vars(module).items() if name.startswith("_global") and isinstance(value, dict)]
