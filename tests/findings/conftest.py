from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradaudit.analysis.report import AuditReport

Script = Callable[[Path], AuditReport]


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Script], AuditReport]:
    """Run a recorded training once per session, however many tests look at its report."""
    reports: dict[Script, AuditReport] = {}

    def run(script: Script) -> AuditReport:
        if script not in reports:
            reports[script] = script(tmp_path_factory.mktemp("run") / "run")
        return reports[script]

    return run
