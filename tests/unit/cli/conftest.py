"""A recorded run, and an audit and a replay whose outcome each test chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gradaudit.analysis.report import AuditReport
from gradaudit.cli import main
from tests.factory import meta, scaler, step, write_run
from tests.unit.reporters import reports

IDS = ("call-order", "gradient-underflow", "healthy-overflow", "scale-collapse")


@dataclass
class Audit:
    """Stands in for gradaudit.analysis.audit: gives `reports` in turn and notes what was asked."""

    reports: list[AuditReport]
    ignored: tuple[str, ...] = ()

    def audit(self, run: Any, *, ignore: tuple[str, ...] = ()) -> AuditReport:
        self.ignored = ignore
        return self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]


@dataclass(frozen=True)
class TorchPolicy:
    init_scale: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float

    def __post_init__(self) -> None:
        if self.growth_factor <= 1:
            raise ValueError(f"growth_factor must be greater than 1, not {self.growth_factor}.")


@dataclass
class ReplayResult:
    step: Any
    scale: Any
    num_skipped: int = 3
    num_skipped_low: int = 2
    num_skipped_high: int = 5
    skip_rate: float = 0.0075
    min_sqnr_db: float | None = 44.0
    num_steps: int = 400


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> Audit:
    audit = Audit([reports.underflow()])
    module = ModuleType("gradaudit.analysis.audit")
    module.audit, module.CHECK_IDS = audit.audit, IDS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gradaudit.analysis.audit", module)
    return audit


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[TorchPolicy]:
    """Policies asked for; the outcome is three steps at 2^10, 2^10 and 2^9."""
    policies: list[TorchPolicy] = []

    def replay(run: Any, policy: TorchPolicy) -> ReplayResult:
        policies.append(policy)
        num_steps = len(run.steps)
        scale = np.array([1024.0, 1024.0, 512.0])[:num_steps]
        return ReplayResult(np.arange(num_steps), scale)

    module = ModuleType("gradaudit.analysis.replay")
    module.TorchPolicy, module.replay = TorchPolicy, replay  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gradaudit.analysis.replay", module)
    return policies


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    recorded = meta(scalers=[scaler(init_scale=64.0, growth_interval=90)])
    return write_run(tmp_path / "digits", run_meta=recorded, steps=[step(i) for i in range(3)])


@pytest.fixture
def gradaudit() -> Callable[..., Result]:
    """Runs the command line in this process."""

    def invoke(*args: object) -> Result:
        return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="gradaudit")

    return invoke
