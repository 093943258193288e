"""The runs of one folder, opened on demand and kept until the writer adds something.

Callbacks run in several threads: dictionaries are guarded by one lock, and the slow work on a run by that run's own,
so that a large run never holds up another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gradaudit.analysis.audit import audit
from gradaudit.analysis.context import TARGET_DB, Analysis, analyse, listed_tensors
from gradaudit.analysis.history import drawable
from gradaudit.analysis.report import AuditReport, History
from gradaudit.errors import GradauditError, RunNotFound
from gradaudit.schema import RUN_FILE
from gradaudit.store import Run, Samples, find_runs, is_run, open_run
from gradaudit.store.reader import run_version
from gradaudit_dashboard.heat import METRIC_TABLE, Matrix, build_matrix

T = TypeVar("T")

MAX_LOADED = 2
"""Runs kept in memory: one to look at and one beside it; a large one holds all its histograms."""

IDLE_FACTOR = 4
"""A live run is analysed again at the earliest after this many times what the last analysis took: the run that is being
watched needs the CPU more than the page does."""

MIN_RELOAD_S = 1.0
RECHECK_S = 5.0
"""How often to ask whether the process behind a live run is still there; a killed one changes no file."""

STALLED_S = 60.0
"""The writer flushes every few seconds, so a minute without a new part is worth an amber badge."""

MAX_NAME = 255


@dataclass(frozen=True, slots=True)
class Status:
    """What the badge in the header says: `state` is live, stalled, ended, failed or unreadable."""

    state: str
    text: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of the list of runs. `problem` is set when the run cannot be read, and then nothing else is known."""

    name: str
    ended: str = ""
    started_at: float | None = None
    num_steps: int = 0
    num_skipped: int = 0
    num_sampled: int = 0
    scale_last: float | None = None
    level: str | None = None
    summary: str = ""
    problem: str = ""


class Loaded:
    """One run as it was at one moment, with everything derived from it worked out once, when first asked for.

    `key` changes when anything but the heartbeat changed on disk.
    """

    def __init__(self, run: Run, version: str, key: str) -> None:
        self.run = run
        self.version = version
        self.key = key
        self.cost_s = 0.0
        self._lock = threading.RLock()
        self._done: dict[str, Any] = {}

    def _once(self, name: str, build: Callable[[], T]) -> T:
        """The value of `build`, or the error it raised, worked out once."""
        with self._lock:
            if name not in self._done:
                start = time.perf_counter()
                try:
                    self._done[name] = (build(), None)
                except Exception as error:  # kept, so that every panel that needs it says why without trying again
                    self._done[name] = (None, error)
                self.cost_s += time.perf_counter() - start
            value, error = self._done[name]
        if error is not None:
            raise error.with_traceback(None)
        return value  # type: ignore[no-any-return]

    @property
    def analysis(self) -> Analysis:
        """Statistics of the gradient tensors."""
        return self._once("analysis", lambda: analyse(self.run))

    @property
    def report(self) -> AuditReport:
        """The audit."""
        return self._once("report", lambda: audit(self.run, analysis=self.analysis))

    @property
    def history(self) -> History:
        """The loss scale over the run, from the step table alone; no scale points where no scaler was in use."""
        return self._once("history", self._history)

    def _history(self) -> History:
        history = drawable(self.run.steps)
        return history if bool((self.run.steps.scaler >= 0).any()) else replace(history, scale_points=())

    @property
    def names(self) -> dict[int, str]:
        """Row name per tensor id, unique in the run."""
        return self._once("names", lambda: row_names(self.analysis))

    @property
    def worst(self) -> tuple[int, ...]:
        """Sampled tensors, the one that most deserves a look first."""
        return self._once("worst", lambda: worst_tensors(self.report, self.names))

    def matrix(self, metric: str) -> Matrix:
        """The heatmap's codes for one of heat.METRIC_TABLE, in full."""
        return self._once(f"matrix {metric}", lambda: self._matrix(metric))

    def _matrix(self, metric: str) -> Matrix:
        analysis, samples = self.analysis, self.analysis.samples
        codes = METRIC_TABLE[metric].codes(analysis.zones, np.asarray(analysis.sqnr_db), TARGET_DB)
        listed = np.isin(samples.tensor, listed_tensors(analysis))
        kept = samples.select(listed)
        return build_matrix(kept.step, kept.tensor, kept.order, kept.scale, codes[listed])

    def samples_of(self, tensor: int) -> Samples:
        """One tensor's samples, by step."""
        samples = self.analysis.samples
        start, stop = np.searchsorted(samples.tensor, [tensor, tensor + 1])
        return samples.select(np.arange(start, stop))

    def tensor_called(self, name: str | None) -> int | None:
        """The sampled tensor with this row name."""
        return next((tensor for tensor, known in self.names.items() if known == name), None)

    @property
    def last_step(self) -> int | None:
        """The newest step on disk."""
        steps = self.run.steps.step
        return int(steps[-1]) if len(steps) else None


class Source:
    """The runs at or below one folder.

    Args:
        root: A run folder or a folder of runs.
        clock: Seconds since the epoch; tests pass their own.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.root = root.resolve()
        self.clock = clock
        self._lock = threading.Lock()
        self._judging = threading.Lock()
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._checked: dict[str, float] = {}
        self._rows: dict[str, tuple[str, RunRow]] = {}

    def names(self) -> list[str]:
        """Runs by name (the path below the root), newest first, readable or not; none that a link leads outside."""
        if is_run(self.root):
            return [self.root.name]
        try:
            found = find_runs(self.root)
        except OSError:
            return []  # a folder went away while it was listed; the next look is a moment later
        return [path.relative_to(self.root).as_posix() for path in found if self._is_inside(path)]

    def only_name(self) -> str | None:
        """The run, if there is exactly one."""
        names = self.names()
        return names[0] if len(names) == 1 else None

    def path_of(self, name: str) -> Path | None:
        """Folder of a run by its name, None for anything that is not a run strictly inside the root."""
        if is_run(self.root):
            return self.root if name == self.root.name else None
        segments = name.split("/")
        if len(name) > MAX_NAME or len(segments) > 2 or any(_is_strange(segment) for segment in segments):
            return None
        path = self.root / name
        try:
            return path if is_run(path) and self._is_inside(path) else None
        except OSError:
            return None

    def _is_inside(self, path: Path) -> bool:
        resolved = path.resolve()
        return resolved != self.root and resolved.is_relative_to(self.root)

    def load(self, name: str) -> Loaded:
        """The run as it is now, or as it was a moment ago if a new look would cost the watched run too much.

        Raises:
            GradauditError: There is no such run, or it cannot be read.
        """
        path = self.path_of(name)
        if path is None:
            with self._lock:
                self._loaded.pop(name, None)
            raise RunNotFound(f"There is no run called {name} in {self.root}; choose one from the list of runs.")
        version = run_version(path)
        with self._lock:
            old = self._loaded.get(name)
            if old is not None and self._is_current(name, old, version):
                self._loaded.move_to_end(name)
                return old
            run = open_run(path)
            key = content_key(run, version)
            self._checked[name] = self.clock()
            if old is not None and old.key == key:
                old.version = version  # only the heartbeat moved
                return old
            self._loaded[name] = Loaded(run, version, key)
            self._loaded.move_to_end(name)
            while len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)
            return self._loaded[name]

    def _is_current(self, name: str, old: Loaded, version: str) -> bool:
        age = self.clock() - self._checked.get(name, 0.0)
        if old.version == version:
            return old.run.ended != "running" or age < RECHECK_S
        return age < max(MIN_RELOAD_S, IDLE_FACTOR * old.cost_s) and old.run.ended == "running"

    def status(self, loaded: Loaded) -> Status:
        """What to say of a run in the header."""
        run, last = loaded.run, loaded.last_step
        at = "before its first step" if last is None else f"at step {last:,}"
        if run.ended == "running":
            silent = self.clock() - newest_part(run.path, self.clock())
            if silent > STALLED_S:
                return Status("stalled", f"stalled {at}: nothing new for {duration(silent)}")
            return Status("live", "live, waiting for the first step" if last is None else f"live, step {last:,}")
        if run.ended == "ok":
            return Status("ended", f"ended {at}")
        return Status("failed", f"killed {at}" if run.ended == "killed" else f"ended by an exception {at}")

    def rows(self, *, budget_s: float) -> list[RunRow]:
        """The list of runs, newest first.

        Verdicts of finished runs are worked out for as long as the budget lasts, at least one per call, so that a
        folder of hundreds shows at once and fills in while it is looked at. Without a budget nothing is judged.
        """
        rows = [self._row(name) for name in self.names()]
        if budget_s <= 0 or not self._judging.acquire(blocking=False):
            return rows
        try:
            deadline = time.perf_counter() + budget_s
            for index, row in enumerate(rows):
                if row.level is None and not row.problem and row.ended != "running":
                    rows[index] = self._with_verdict(row)
                    if time.perf_counter() > deadline:
                        break
        finally:
            self._judging.release()
        return rows

    def _row(self, name: str) -> RunRow:
        path = self.path_of(name)
        version = run_version(path) if path is not None else ""
        with self._lock:
            known = self._rows.get(name)
        if known is not None and known[0] == version and known[1].ended != "running":
            return known[1]
        row = _read_row(name, path) if path is not None else RunRow(name, problem="it is gone")
        with self._lock:
            self._rows[name] = (version, row)
        return row

    def _with_verdict(self, row: RunRow) -> RunRow:
        path = self.path_of(row.name)
        try:
            verdict = audit(open_run(path)).verdict if path is not None else None
        except Exception as error:  # one run's trouble is its own line, whatever it is
            judged = replace(row, problem=reason(error))
        else:
            judged = replace(row, level=verdict.level, summary=verdict.summary) if verdict else row
        with self._lock:
            version = self._rows[row.name][0]
            self._rows[row.name] = (version, judged)
        return judged


def row_names(analysis: Analysis) -> dict[int, str]:
    """A unique name per listed tensor; of equal labels the later ones get a number, so that links keep their meaning
    while a run grows.
    """
    names: dict[int, str] = {}
    taken: dict[str, int] = {}
    for tensor in listed_tensors(analysis):
        label = analysis.tensors[tensor].label or f"tensor {tensor}"
        taken[label] = taken.get(label, 0) + 1
        names[tensor] = label if taken[label] == 1 else f"{label} #{taken[label]}"
    return names


def worst_tensors(report: AuditReport, names: dict[int, str]) -> tuple[int, ...]:
    """Sampled tensors by what most deserves a look: NaN or inf, then the lowest SQNR, then the rest."""
    sqnr = {layer.tensor: layer.sqnr_db for layer in report.layers}
    broken = {layer.tensor for layer in report.layers if layer.zones.get("nan", 0) + layer.zones.get("overflow", 0) > 0}

    def rank(tensor: int) -> tuple[bool, float, int]:
        value = sqnr.get(tensor)
        return (tensor not in broken, value if value is not None and value == value else float("inf"), tensor)

    return tuple(sorted(names, key=rank))


def content_key(run: Run, version: str) -> str:
    """Fingerprint of what a page shows: part names and sizes, run.json but for its heartbeat, and how it ended."""
    parts = [entry for entry in version.split("|") if ".parquet" in entry]
    meta = {key: value for key, value in run.meta.items() if key != "heartbeat_at"}
    text = json.dumps([parts, meta, run.ended], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def newest_part(path: Path, default: float) -> float:
    """When the newest part of a run was written (its run.json while there is none), in seconds since the epoch."""
    newest = 0.0
    try:
        for folder in path.glob("rank-*"):
            times = (entry.stat().st_mtime for entry in os.scandir(folder) if entry.name.endswith(".parquet"))
            newest = max(newest, *times, 0.0)
        return newest or (path / RUN_FILE).stat().st_mtime
    except OSError:
        return default  # merged away just now, so something was written


def duration(seconds: float) -> str:
    """`95 s`, `12 min`, `3 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def reason(error: Exception) -> str:
    """An error in one line for a page: gradaudit's own sentences as they are, others with their type."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, GradauditError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _read_row(name: str, path: Path) -> RunRow:
    try:
        run = open_run(path)
        steps = run.steps
        started = run.meta.get("started_at")
        return RunRow(
            name=name,
            ended=run.ended,
            started_at=float(started) if isinstance(started, (int, float)) else None,
            num_steps=len(steps),
            num_skipped=int(steps.skipped.sum()),
            num_sampled=int(steps.sampled.sum()),
            scale_last=float(steps.scale[-1]) if len(steps) and bool((steps.scaler >= 0).any()) else None,
        )
    except Exception as error:  # a broken run stays in the list and breaks no other
        return RunRow(name, problem=reason(error))


def _is_strange(segment: str) -> bool:
    return segment in ("", ".", "..") or any(char in segment for char in "\\:") or not segment.isprintable()
