"""From the device to the disk without making training wait.

The training thread hands over packets: what is known on the host already, and device tensors on their way to pinned
memory. A writer thread waits for the copies, turns packets into rows, and flushes every two seconds. When it falls
behind, histograms are dropped and counted; step rows and events never are.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaudit.capture.host_copy import HostCopy
from gradaudit.capture.statistic import has_nonfinite, merge_rows, row_values
from gradaudit.capture.trace.opnotes import TracedOps, op_rows
from gradaudit.store.writer import RunWriter

FLUSH_S = 2.0
"""What a SIGKILL may cost."""

MAX_WAITING_SAMPLES = 64
"""Sampled steps in flight before histograms are dropped: 1,000 tensors' rows are 0.8 MB a step."""


@dataclass(slots=True)
class SampledTensors:
    """The statistics of one sampled step: stacked rows, and for each (tensor id, scaled, order, keep the histogram).

    `gain_tensors` are the tensor ids that the values of `gains` belong to, a tensor once per call of its layer.
    """

    columns: list[tuple[int, bool, int, bool]]
    rows: list[HostCopy]
    gain_tensors: list[int]
    gains: list[HostCopy]


@dataclass(slots=True)
class Packet:
    """One step. `scalars` are device values in the order that `finish` expects; `finish` makes the step row of them.

    `found` says where among them the scaler's found_inf stand, `armed` whether the step was to be traced. Without
    `has_row` the step never came to its end, and only what was seen of it is written.
    """

    step: int
    scaler: int | None
    scalars: list[HostCopy]
    found: slice
    finish: Callable[[np.ndarray], dict[str, Any]]
    samples: SampledTensors | None
    ops: TracedOps | None
    armed: bool
    has_row: bool = True

    @property
    def on_host(self) -> bool:
        """Whether the host knows all of it already."""
        return all(copy.on_host for copy in self.scalars)

    def row(self) -> dict[str, Any]:
        """The step row. Sync: waits for the copies; for the writer thread, or where waiting was asked for."""
        scalars = [copy.numpy() for copy in self.scalars]
        with np.errstate(all="ignore"):  # a mean of infs is no reason to warn the user
            return self.finish(np.concatenate(scalars) if scalars else np.zeros(0))


@dataclass(slots=True)
class Pending:
    """A row of the call-order log whose detail comes from a device, or something else that has to wait for one.

    `finish` gets the values and returns the row, None where there is nothing to write.
    """

    scalars: list[HostCopy]
    finish: Callable[[np.ndarray], dict[str, Any] | None]

    def row(self) -> dict[str, Any] | None:
        """The row. Sync: waits for the copies; for the writer thread."""
        scalars = [copy.numpy() for copy in self.scalars]
        return self.finish(np.concatenate(scalars) if scalars else np.zeros(0))


class Recorder:
    """Owns the writer thread; opened with the run, closed with it.

    Args:
        writer: Where rows go; only this object's thread calls it from now on.
        describe: Returns run.json as of now; called in the writer thread.

    `on_step` is told of every step row, in the writer thread.
    """

    def __init__(self, writer: RunWriter, describe: Callable[[], dict[str, Any]]) -> None:
        self.error: Exception | None = None
        self.num_dropped = 0
        self.on_step: Callable[[Packet, dict[str, Any]], None] | None = None
        self._writer = writer
        self._describe = describe
        self._packets: deque[Packet] = deque()
        self._events: deque[dict[str, Any] | Pending] = deque()
        self._num_waiting_samples = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="gradaudit-recorder", daemon=True)
        self._thread.start()

    def put(self, packet: Packet) -> None:
        """Queue one step. Sync: none."""
        if packet.samples is not None:
            if self._num_waiting_samples >= MAX_WAITING_SAMPLES:
                packet.samples = packet.ops = None
                self.num_dropped += 1
            else:
                self._num_waiting_samples += 1
                if self._num_waiting_samples >= MAX_WAITING_SAMPLES // 4:
                    self._wake.set()
        self._packets.append(packet)

    def put_event(self, event: dict[str, Any] | Pending) -> None:
        """Queue one row of the call-order log, its detail as a dict. Sync: none."""
        self._events.append(event)

    def close(self) -> None:
        """Write what is queued and end the thread. Sync: waits for the last copies and the disk."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            last_flush = time.monotonic()
            while True:
                closing = self._closing
                self._wake.wait(0.0 if closing else 0.25)
                self._wake.clear()
                self._drain()
                if closing or time.monotonic() - last_flush >= FLUSH_S:
                    self._writer.meta = self._describe()
                    self._writer.flush()
                    last_flush = time.monotonic()
                if closing:
                    return
        except Exception as error:  # reported by the auditor, which turns capture off: training goes on
            self.error = error

    def _drain(self) -> None:
        steps, samples, ops = [], [], []
        for _ in range(len(self._packets)):  # not those that come meanwhile: they might never end
            packet = self._packets.popleft()
            step = packet.row()
            if packet.has_row:
                steps.append({**step, "traced": step["traced"] and packet.ops is not None})
                if self.on_step is not None:
                    self.on_step(packet, step)
            if packet.samples is not None:
                samples += sample_rows(packet.samples, step)
                self._num_waiting_samples -= 1
            if packet.ops is not None:
                ops += op_rows(packet.ops, packet.step)
        self._writer.append("steps", steps)
        self._writer.append("samples", samples)
        self._writer.append("ops", ops)
        events = [self._events.popleft() for _ in range(len(self._events))]
        rows = [event.row() if isinstance(event, Pending) else event for event in events]
        self._writer.append("events", [event_row(row) for row in rows if row is not None])


def event_row(event: dict[str, Any]) -> dict[str, Any]:
    """A row of the call-order log as it is written: the detail as JSON."""
    detail = event.get("detail")
    return {**event, "detail": None if detail is None else json.dumps(detail, allow_nan=False)}


def has_bad_outputs(samples: SampledTensors) -> bool:
    """Whether an output of a module held a NaN or an inf; False where the host does not know. Sync: none."""
    if not all(copy.on_host for copy in samples.rows):
        return False
    stacked = np.concatenate([copy.numpy() for copy in samples.rows])
    outputs = np.array([not keep_histogram for *_, keep_histogram in samples.columns])
    return has_nonfinite(stacked[outputs])


def sample_rows(samples: SampledTensors, step: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the sample table from one step's statistics, those of one tensor merged over micro-steps."""
    stacked = np.concatenate([copy.numpy() for copy in samples.rows])
    gains: dict[int, list[float]] = {}
    for tensor, gain in zip(samples.gain_tensors, [v for copy in samples.gains for v in copy.numpy()], strict=True):
        gains.setdefault(tensor, []).append(float(gain))
    by_tensor: dict[int, list[int]] = {}
    for i, (tensor, *_) in enumerate(samples.columns):
        by_tensor.setdefault(tensor, []).append(i)
    rows = []
    for tensor, indices in by_tensor.items():
        _, scaled, order, keep_histogram = samples.columns[indices[0]]
        row = stacked[indices[0]] if len(indices) == 1 else merge_rows(stacked[indices])
        values = row_values(row)
        if not keep_histogram:
            values["counts"] = None
        rows.append(
            {
                "step": step["step"],
                "tensor": tensor,
                "scale": step["scale"],
                "scaled": scaled,
                "order": order,
                "num_micro_steps": len(indices),
                "noise_gain": float(np.mean(gains[tensor])) if tensor in gains else None,
                **values,
            }
        )
    return rows
