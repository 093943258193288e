"""`attach`: the recording as something opened and closed, by hand or by `gradaudit run`."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

import gradaudit
from gradaudit.capture.apply import ScalerSettings, apply_to_new_scalers
from gradaudit.capture.auditor import Auditor
from gradaudit.capture.callsite import shorten
from gradaudit.capture.patches import install
from gradaudit.capture.recorder import Recorder
from gradaudit.capture.settings import CaptureSettings
from gradaudit.errors import CaptureError
from gradaudit.schema import RUN_FORMAT, SCHEMA_VERSION
from gradaudit.store.folders import default_folder
from gradaudit.store.host import host_id
from gradaudit.store.writer import RunWriter

if TYPE_CHECKING:
    from gradaudit.analysis.report import AuditReport

_attached: list[Audit] = []
"""The one recording of this process: torch's hooks are global, so there is never a second."""


class Audit:
    """A recording under way. Made by `attach`; use it as a context manager or call `close`.

    `path` is the run folder.
    """

    def __init__(
        self,
        path: Path,
        settings: CaptureSettings,
        *,
        argv: Sequence[str],
        force: bool,
        apply: ScalerSettings | None = None,
    ) -> None:
        self.path = path
        if _attached:
            raise CaptureError(f"gradaudit already records to {_attached[0].path}; close that recording first.")
        self._ended: str | None = None
        self._exception: dict[str, Any] | None = None
        self._pid = os.getpid()
        rank = int(os.environ.get("RANK", "0"))
        run = {
            "format": RUN_FORMAT,
            "schema_version": SCHEMA_VERSION,
            "gradaudit_version": gradaudit.__version__,
            "torch_version": torch.__version__,
            "python_version": platform.python_version(),
            "argv": list(argv),
            "started_at": time.time(),
            "pid": self._pid,
            "host": host_id(),
            "rank": rank,
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "settings": settings.to_dict(),
            "applied": _describe_settings(apply),
            "ended": None,
            "exception": None,
        }
        self._auditor = Auditor(settings, run)
        self._writer = RunWriter(path, rank=rank, meta=self._auditor.describe(), force=force)
        self._recorder = Recorder(self._writer, self._describe)
        self._auditor.start(self._recorder)
        self._unapply = None
        try:
            self._unapply = apply_to_new_scalers(apply) if apply is not None else None
            self._uninstall = install(self._auditor)
        except BaseException:
            if self._unapply is not None:
                self._unapply()
            self._recorder.close()
            raise
        _attached.append(self)

    def add_root(self, module: torch.nn.Module) -> None:
        """Take names from this module before it is first called."""
        self._auditor.names.add_root(module)

    def __enter__(self) -> Audit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Stop recording and finish the run on disk; a second call does nothing.

        Args:
            error: What ended the training, if it did not end by itself.

        Sync: waits for the last copies from the device.
        """
        if self not in _attached:
            return
        _attached.remove(self)
        self._uninstall()
        if self._unapply is not None:
            self._unapply()
        self._auditor.close_open_steps()
        self._ended = "ok"
        if error is not None and not _is_clean_exit(error):
            self._ended = "exception"
            self._exception = _describe_exception(error)
        self._recorder.close()
        if self._recorder.error is not None:
            self._auditor.fail(self._recorder.error)
            self._leave_a_note()
        self._auditor.off = True  # for wrappers that somebody else has wrapped, and that stay

    def report(self) -> AuditReport:
        """Close the recording and audit the run.

        Sync: as `close`.
        """
        from gradaudit.analysis.audit import audit
        from gradaudit.store import open_run

        self.close()
        return audit(open_run(self.path))

    def _describe(self) -> dict[str, Any]:
        return {**self._auditor.describe(), "ended": self._ended, "exception": self._exception}

    def _leave_a_note(self) -> None:
        try:
            self._writer.meta = self._describe()
            self._writer.write_meta()
        except OSError:
            pass  # the disk that made the recorder fail; the warning has been given


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    every: int = 10,
    budget: float | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    force: bool = False,
) -> Audit:
    """Record the training that follows, until the returned object is closed.

    Everything that trains in this process is recorded, as with `gradaudit run`; the arguments give names early.

    Example:
        with gradaudit.attach(model, optimizer, scaler, out="runs/a") as audit:
            train()
        report = audit.report()

    Args:
        model: Root of the names.
        optimizer: Named before its first step.
        scaler: A GradScaler whose settings are noted before its first use.
        out: Run folder; by default gradaudit-runs/<script>-<date>-<time>.
        every: Take histograms every this many steps.
        budget: Percent of step time that recording may cost; lengthens the interval.
        include: fqn globs; only these get histograms.
        exclude: fqn globs; these get none.
        force: Whether a run already in `out` may be replaced.

    Raises:
        CaptureError: Another recording is open, or the folder cannot be written.
        RunExists: `out` holds a run already.
        ValueError: A setting is out of range.

    Sync: none.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass the torch.nn.Module that is trained.")
    settings = CaptureSettings(every=every, budget=budget, include=_patterns(include), exclude=_patterns(exclude))
    path = Path(out) if out is not None else default_folder(sys.argv[0] if sys.argv else "")
    audit = Audit(path, settings, argv=[shorten(arg) if os.path.isabs(arg) else arg for arg in sys.argv], force=force)
    audit.add_root(model)
    audit._auditor.introduce(optimizer, scaler)
    return audit


def _patterns(globs: str | Sequence[str]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)


def _describe_settings(settings: ScalerSettings | None) -> dict[str, float] | None:
    if settings is None:
        return None
    names = ("init_scale", "growth_interval", "growth_factor", "backoff_factor")
    return {name: getattr(settings, name) for name in names}


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _describe_exception(error: BaseException) -> dict[str, Any]:
    file, line = None, None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((os.path.dirname(torch.__file__), os.path.dirname(gradaudit.__file__), "<")):
            file, line = shorten(name), trace.tb_lineno
        trace = trace.tb_next
    message = str(error).strip().splitlines()
    return {"type": type(error).__name__, "message": message[0] if message else "", "file": file, "line": line}


def _after_fork() -> None:
    # a forked worker inherits the hooks but neither the thread nor the right to write into the run
    while _attached:
        audit = _attached.pop()
        audit._auditor.off = True


def _at_exit() -> None:
    # a script that never closes its recording has still recorded up to its end
    for audit in list(_attached):
        audit.close(getattr(sys, "last_value", None))


atexit.register(_at_exit)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
