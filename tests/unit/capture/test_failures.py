"""When gradaudit fails, training goes on, the user is told once, and the run says what is missing."""

from __future__ import annotations

import errno
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import gradaudit
from gradaudit.capture import auditor, forward, graph, passes, recorder, steps
from gradaudit.capture.host_copy import HostCopy
from gradaudit.capture.recorder import Packet, Recorder, SampledTensors
from gradaudit.capture.statistic import tensor_row
from gradaudit.store import Run, open_run
from gradaudit.store.writer import RunWriter
from tests.factory import meta
from tests.factory import step as step_of
from tests.unit.capture.trainings import net, record, scaler, step


@contextmanager
def told_once(match: str) -> Iterator[None]:
    with pytest.warns(RuntimeWarning, match=match) as caught:
        yield
    ours = [entry for entry in caught if "gradaudit" in str(entry.message)]
    assert len(ours) == 1
    assert str(ours[0].message).endswith("training goes on unobserved.")


def train(folder: Path, *, num_steps: int = 5, after: Any = None) -> tuple[Run, torch.Tensor]:
    """Train with capture on; returns the run and the final weights."""
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradaudit.attach(model, out=folder, every=1):
        for i in range(num_steps):
            step(model, optimizer, s, i=i)
            if after is not None:
                after(i)
    return open_run(folder), model[0].weight.detach()


def wait_for_the_disk(i: int) -> None:
    time.sleep(0.15)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", refuse)
    monkeypatch.setattr(recorder, "FLUSH_S", 0.05)


@pytest.mark.usefixtures("full_disk")
def test_a_disk_that_fills_up_while_recording_stops_the_recording_alone(tmp_path: Path) -> None:
    with told_once("No space left on device"):
        run, weight = train(tmp_path / "run", num_steps=12, after=wait_for_the_disk)
    assert len(run.meta["errors"]) == 1
    assert "OSError: [Errno 28] No space left on device" in run.meta["errors"][0]
    assert run.ended == "ok"
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(12):
        step(model, optimizer, s, i=i)
    assert torch.equal(weight, model[0].weight)


def test_a_disk_that_is_full_at_the_end_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", refuse)
    with told_once("No space left on device"):
        run, _ = train(tmp_path / "run")
    assert "No space left" in run.meta["errors"][0]


def test_where_not_even_the_note_can_be_written_the_warning_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = RunWriter.write_meta
    num_written = []

    def only_once(self: RunWriter) -> None:
        num_written.append(1)
        if len(num_written) > 1:
            raise OSError(errno.EROFS, "Read-only file system")
        flush(self)

    monkeypatch.setattr(RunWriter, "write_meta", only_once)
    with told_once("Read-only file system"):
        train(tmp_path / "run")


def test_a_folder_removed_while_recording_stops_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)

    def remove(i: int) -> None:
        wait_for_the_disk(i)
        if i == 1:
            (tmp_path / "run").rename(tmp_path / "gone")  # at once: the recorder is writing into it

    with told_once("No such file or directory"), pytest.raises(gradaudit.RunNotFound):
        train(tmp_path / "run", num_steps=8, after=remove)


@pytest.mark.parametrize(
    "method",
    ["on_forward_start", "on_forward_end", "on_backward_start", "_on_gradient", "on_scaler_step_start", "on_update"],
)
def test_a_hook_that_fails_turns_capture_off_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    # inside the guard: what a method calls fails, not the method itself
    place, inner = {
        "on_forward_start": (forward, "next_sequence"),
        "on_forward_end": (forward, "floating_tensors"),
        "on_backward_start": (passes, "hook_graph"),
        "_on_gradient": (steps, "tensor_row"),
        "on_scaler_step_start": (steps, "largest_each"),
        "on_update": (auditor, "make_packet"),
    }[method]
    original, num_calls = getattr(place, inner), []

    def fail(*args: Any, **kwargs: Any) -> Any:
        num_calls.append(1)
        if len(num_calls) > 2:
            raise ZeroDivisionError("a bug of gradaudit's\nwith a second line")
        return original(*args, **kwargs)

    monkeypatch.setattr(place, inner, fail)
    with told_once(r"stopped recording at step \d \(ZeroDivisionError: a bug of gradaudit's\)"):
        run, weight = train(tmp_path / "run")
    assert len(num_calls) == 3
    assert len(run.meta["errors"]) == 1
    assert run.ended == "ok"
    monkeypatch.undo()
    assert torch.equal(weight, train(tmp_path / "whole")[1])


def test_a_failure_under_warnings_as_errors_is_still_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(steps, "largest_each", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run, _ = train(tmp_path / "run")
    assert run.meta["errors"] == ["capture stopped at step 0: ZeroDivisionError"]


def test_ctrl_c_inside_a_hook_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "largest_each", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    assert open_run(tmp_path / "run").ended == "exception"


def test_after_a_failure_no_hook_stays_on_a_graph_that_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    handles: list[Any] = []
    hook_graph = passes.hook_graph

    def remember(*args: Any) -> Any:
        walk = hook_graph(*args)
        handles.append(walk)
        assert walk.handles
        return walk

    monkeypatch.setattr(passes, "hook_graph", remember)
    monkeypatch.setattr(steps, "tensor_row", fail)
    model = net()
    with gradaudit.attach(model, out=tmp_path / "run", include="loss"):
        loss = model(torch.ones(1, 8)).mean()
        with pytest.warns(RuntimeWarning):
            loss.backward(retain_graph=True)
    assert [walk.handles for walk in handles] == [[]]


def test_a_failure_lets_go_of_what_was_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        row = tensor_row(x)
        rows.append(weakref.ref(row))
        return row

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(steps, "tensor_row", noted)
    monkeypatch.setattr(steps, "largest_each", fail)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradaudit.attach(model, out=tmp_path / "run"):
        with pytest.warns(RuntimeWarning):
            step(model, optimizer)
        gc.collect()
        assert rows
        assert not any(ref() is not None for ref in rows)


def test_forward_without_end_fills_a_bounded_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that forgot no_grad, before the first step."""
    monkeypatch.setattr(steps, "MAX_WINDOW_ROWS", 40)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes: list[int] = []

    def evaluate() -> None:
        for i in range(50):
            model(torch.full((1, 8), float(i)))
        step(model, optimizer)

    put = Recorder.put
    monkeypatch.setattr(
        Recorder, "put", lambda self, packet: sizes.append(len(packet.samples.columns)) or put(self, packet)
    )
    run = record(tmp_path / "run", evaluate, model=model)
    assert sizes
    assert max(sizes) <= 40 + 10
    assert len(run.steps) == 1


class Blocked:
    """A device copy that arrives only when it is let."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def numpy(self) -> Any:
        assert self.event.wait(10)
        return tensor_row(torch.ones(3)).numpy()[None]


def packet(i: int, samples: SampledTensors) -> Packet:
    return Packet(i, 0, [], slice(0), lambda values: step_of(i, traced=False), samples, ops=None, armed=False)


def test_where_the_writer_falls_behind_histograms_are_dropped_and_counted_but_steps_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING_SAMPLES", 3)
    gate = threading.Event()
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta([]))
    opened = Recorder(writer, lambda: {**meta([]), "drops": {"sampled_steps": opened.num_dropped}})
    for i in range(10):
        blocked: Any = Blocked(gate)
        samples = SampledTensors([(0, True, 0, True)], [blocked], [], [])
        opened.put(packet(i, samples))
        opened.put_event({"seq": i, "step": i, "micro_step": 0, "name": "backward"})
    gate.set()
    opened.close()

    run = open_run(tmp_path / "run")
    assert run.steps.step.tolist() == list(range(10))
    assert len(run.events()) == 10
    assert len(run.samples()) == 3
    assert run.meta["drops"] == {"sampled_steps": 7}


def test_a_backlog_wakes_the_writer_before_anything_is_dropped(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta([]))
    opened = Recorder(writer, lambda: meta([]))
    row = HostCopy(tensor_row(torch.ones(3))[None])
    deadline = time.monotonic() + 20
    for i in range(recorder.MAX_WAITING_SAMPLES * 3):
        opened.put(packet(i, SampledTensors([(0, True, 0, True)], [row], [], [])))
        while opened._num_waiting_samples > recorder.MAX_WAITING_SAMPLES // 2 and time.monotonic() < deadline:
            time.sleep(0.001)
    opened.close()
    assert opened.num_dropped == 0
    assert len(open_run(tmp_path / "run").samples()) == recorder.MAX_WAITING_SAMPLES * 3


def test_rows_of_one_tensor_are_merged_and_its_gains_averaged() -> None:
    rows = torch.stack(
        [tensor_row(torch.tensor([1.0, 0.0])), tensor_row(torch.tensor([4.0])), tensor_row(torch.ones(5))]
    )
    samples = SampledTensors(
        columns=[(7, True, 0, True), (7, True, 1, True), (8, False, 2, False)],
        rows=[HostCopy(rows[:2]), HostCopy(rows[2:])],
        gain_tensors=[7, 7],
        gains=[HostCopy(torch.tensor([1.0, 3.0], dtype=torch.float64))],
    )
    first, second = recorder.sample_rows(samples, {"step": 3, "scale": 8.0})
    assert (first["tensor"], first["numel"], first["num_zero"], first["amax"]) == (7, 3, 1, 4.0)
    assert (first["num_micro_steps"], first["noise_gain"], first["scale"], first["order"]) == (2, 2.0, 8.0, 0)
    assert (second["counts"], second["noise_gain"], second["scaled"], second["numel"]) == (None, None, False, 5)


def test_module_calls_without_end_are_forgotten_by_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_MARKS", 100)
    model = net()
    with gradaudit.attach(model, out=tmp_path / "run") as audit:
        for _ in range(100):
            model(torch.ones(1, 8))
        assert len(audit._recording._auditor.forward.marks.starts) <= 100 + 8
