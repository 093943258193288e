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
    from gradaudit.analysis.report import AuditReport as AuditReport
    from gradaudit.capture.apply import apply as apply
    from gradaudit.session import Audit as Audit
    from gradaudit.session import attach as attach
    from gradaudit.store import Run as Run
    from gradaudit.store import open_run as open_run


_LAZY = {
    "Audit": "gradaudit.session",
    "AuditReport": "gradaudit.analysis.report",
    "Run": "gradaudit.store",
    "apply": "gradaudit.capture.apply",
    "attach": "gradaudit.session",
    "audit": "gradaudit.analysis.audit",
    "open_run": "gradaudit.store",
}

__all__ = [
    "Audit",
    "AuditReport",
    "CaptureError",
    "GradauditError",
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
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gradaudit' has no attribute {name!r}")
