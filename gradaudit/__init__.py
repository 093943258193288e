"""gradaudit: a diagnostic profiler and gradient auditor for FP16 training in PyTorch.

Four ways in: `gradaudit run train.py` on the command line, `attach` around a training loop, `open_run` and `audit` on a
recorded run. Only `attach` and `apply` need torch; everything is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradaudit._version import __version__
from gradaudit.errors import CaptureError, GradauditError, RunCorrupt, RunExists, RunNotFound, SchemaMismatch

if TYPE_CHECKING:
    from gradaudit.analysis.audit import audit as audit
    from gradaudit.analysis.batch import BatchReplay as BatchReplay
    from gradaudit.analysis.probe import ProbeResult as ProbeResult
    from gradaudit.analysis.report import AuditReport as AuditReport
    from gradaudit.capture.apply import apply as apply
    from gradaudit.rerun import replay_batch as replay_batch
    from gradaudit.session import Audit as Audit
    from gradaudit.session import attach as attach
    from gradaudit.store import Run as Run
    from gradaudit.store import open_run as open_run


_LAZY = {
    "Audit": "gradaudit.session",
    "AuditReport": "gradaudit.analysis.report",
    "ProbeResult": "gradaudit.analysis.probe",
    "Run": "gradaudit.store",
    "apply": "gradaudit.capture.apply",
    "BatchReplay": "gradaudit.analysis.batch",
    "attach": "gradaudit.session",
    "audit": "gradaudit.analysis.audit",
    "open_run": "gradaudit.store",
    "replay_batch": "gradaudit.rerun",
}

__all__ = [
    "Audit",
    "AuditReport",
    "BatchReplay",
    "CaptureError",
    "GradauditError",
    "ProbeResult",
    "Run",
    "RunCorrupt",
    "RunExists",
    "RunNotFound",
    "SchemaMismatch",
    "__version__",
    "apply",
    "attach",
    "audit",
    "open_run",
    "replay_batch",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gradaudit' has no attribute {name!r}")
