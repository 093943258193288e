"""A recording as something opened and closed: by hand through `gradaudit.attach`, or by `gradaudit run`."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from gradaudit._version import __version__
from gradaudit.capture.apply import ScalerSettings, apply_to_new_scalers
from gradaudit.capture.auditor import Auditor
from gradaudit.capture.callsite import shorten
from gradaudit.capture.patches import install
from gradaudit.capture.recorder import Recorder
from gradaudit.capture.registry import Known
from gradaudit.capture.rerun.batches import Batches
from gradaudit.capture.settings import CaptureSettings
from gradaudit.errors import CaptureError
from gradaudit.schema import RUN_FORMAT, SCHEMA_VERSION, rank_dir
from gradaudit.store.host import host_id
from gradaudit.store.writer import RunWriter

_attached: list[Recording] = []
"""The one recording of this process: torch's hooks are global, so there is never a second."""


class Recording:
    """A recording under way; `close` ends it. Only one can be open in a process.

    Args:
        path: Run folder.
        settings: What to record.
        argv: The command line to note in the run.
        force: Whether a run already in the folder may be replaced.
        apply: Settings for every GradScaler built while the recording is open.

    Raises:
        CaptureError: Another recording is open, or the folder cannot be written.
        RunExists: The folder holds a run already.
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
            "gradaudit_version": __version__,
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
        self._auditor.start(self._recorder, Batches(path / rank_dir(rank) if settings.save_batch else None))
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

    def introduce(self, model: torch.nn.Module, optimizer: Any, scaler: Any) -> None:
        """Take names and settings from these before their first use. Sync: none."""
        self._auditor.introduce(model, optimizer, scaler)

    def known(self) -> Known:
        """The models, parameters and scalers seen so far and still alive. Sync: none."""
        return self._auditor.known()

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
        failed = error is not None and not _is_clean_exit(error)
        self._auditor.close_open_steps(failed=failed and isinstance(error, (Exception, SystemExit)))
        self._ended = "ok"
        if error is not None and failed:
            self._ended = "exception"
            self._exception = _describe_exception(error)
        self._recorder.close()
        if self._recorder.error is not None:
            self._auditor.fail(self._recorder.error)
            self._leave_a_note()
        self._auditor.off = True  # for wrappers that somebody else has wrapped, and that stay

    def _describe(self) -> dict[str, Any]:
        return {**self._auditor.describe(), "ended": self._ended, "exception": self._exception}

    def _leave_a_note(self) -> None:
        try:
            self._writer.meta = self._describe()
            self._writer.write_meta()
        except OSError:
            pass  # the disk that made the recorder fail; the warning has been given


@contextmanager
def nothing_recorded() -> Iterator[None]:
    """Whatever recording is open pauses; another may be opened and closed inside."""
    held = list(_attached)
    _attached.clear()
    try:
        with ExitStack() as pauses:
            for recording in held:
                pauses.enter_context(recording._auditor.paused())
            yield
    finally:
        _attached[:] = held


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
        if not name.startswith((os.path.dirname(torch.__file__), str(Path(__file__).parent.parent), "<")):
            file, line = shorten(name), trace.tb_lineno
        trace = trace.tb_next
    message = str(error).strip().splitlines()
    return {"type": type(error).__name__, "message": message[0] if message else "", "file": file, "line": line}


def _after_fork() -> None:
    # a forked worker inherits the hooks but neither the thread nor the right to write into the run
    while _attached:
        _attached.pop()._auditor.off = True


def _at_exit() -> None:
    # a script that never closes its recording has still recorded up to its end
    for recording in list(_attached):
        recording.close(getattr(sys, "last_value", None))


atexit.register(_at_exit)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
