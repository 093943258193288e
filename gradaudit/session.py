"""`attach` and `Audit`: recording and judging in one process, for training loops that call gradaudit themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from gradaudit.capture.callsite import shorten
from gradaudit.capture.recording import Recording
from gradaudit.capture.settings import CaptureSettings
from gradaudit.store.folders import default_folder

if TYPE_CHECKING:
    from gradaudit.analysis.probe import ProbeResult
    from gradaudit.analysis.report import AuditReport


class Audit:
    """A recording under way and, once it is closed, its report. Made by `attach`; a context manager.

    `path` is the run folder.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.path = recording.path

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
        self._recording.close(error)

    def probe(self, closure: Callable[[], torch.Tensor], *, scales: Sequence[float] | None = None) -> ProbeResult:
        """Run one batch at several loss scales: is it the forward or the backward that fails, and which scale is safe?

        Nothing of it is recorded, and the training stays bit-identical: weights, buffers, gradients, random numbers,
        training flags and the scaler's state are put back, also where the closure raises. What the closure changes
        outside models, optimizers and scalers (a data iterator, a generator of its own) is not.

        Example:
            def one_batch():
                with torch.autocast("cuda", dtype=torch.float16):
                    return criterion(model(x), y)

            print(audit.probe(one_batch).verdict)

        Args:
            closure: Runs the forward of one batch, with its autocast, and returns the unscaled loss. It is called
                once per scale, each time with the same random numbers.
            scales: Scales to try. None: powers of two from 1 upwards to the first that overflows, 2^24 at most;
                downwards from 1, to 2^-24 at most, where 1 overflows.

        Raises:
            RuntimeError: The closure stepped an optimizer, or stepped or updated a scaler.
            ValueError: It returned no loss, or a scale is not a positive number.

        Sync: waits for the device at every scale.
        """
        from gradaudit.rerun import probe

        return probe(self._recording.known(), closure, scales)

    def report(self) -> AuditReport:
        """Close the recording and audit the run.

        Raises:
            GradauditError: The run cannot be read.

        Sync: as `close`.
        """
        from gradaudit.analysis.audit import audit
        from gradaudit.store import open_run

        self.close()
        return audit(open_run(self.path))


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
    origin: str = "auto",
    save_batch: bool = False,
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
        origin: "auto" traces the operations of the forward after a fault, with the user's lines; "always" those of
            every step, from the first on.
        save_batch: Keep the batch of a step that fails, for `gradaudit.replay_batch`: at most three a run. Costs a
            copy of every batch and, once a step, of the weights, on their device, and waits for the device at the end
            of every step.
        force: Whether a run already in `out` may be replaced.

    Raises:
        CaptureError: Another recording is open, or the folder cannot be written.
        RunExists: `out` holds a run already.
        ValueError: A setting is out of range.

    Sync: none.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass the torch.nn.Module that is trained.")
    settings = CaptureSettings(
        every=every,
        budget=budget,
        include=_patterns(include),
        exclude=_patterns(exclude),
        origin=origin,
        save_batch=save_batch,
    )
    path = Path(out) if out is not None else default_folder(sys.argv[0] if sys.argv else "")
    argv = [shorten(arg) if os.path.isabs(arg) else arg for arg in sys.argv]
    recording = Recording(path, settings, argv=argv, force=force)
    recording.introduce(model, optimizer, scaler)
    return Audit(recording)


def _patterns(globs: str | Sequence[str]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)
