"""Training loops of one optimizer, written out call by call, recorded and audited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradaudit
from gradaudit.analysis.report import AuditReport
from tests.findings.training import classification, dynamic, half, mlp, the

Body = Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, int], object]

STEPS = 24


def train(
    path: Path,
    body: Body,
    *,
    steps: int = STEPS,
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.SGD,
    raises: str | None = None,
    **scaler: Any,
) -> AuditReport:
    """A recorded loop; `body` is one iteration after zero_grad, `raises` what torch says in the end."""
    model = mlp()
    with gradaudit.attach(model, out=path, every=5) as audit:
        optimizer, grad_scaler = make(model.parameters()), dynamic(**scaler)

        def loop() -> None:
            for step in range(steps):
                optimizer.zero_grad()
                body(model, optimizer, grad_scaler, step)

        if raises is None:
            loop()
        else:
            with pytest.raises((RuntimeError, AssertionError), match=raises):
                loop()
    return audit.report()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    with half():
        return classification(model, step)


def line(report: AuditReport, name: str, call: str) -> str:
    """The source line of the one call of that name among a finding's places."""
    (place,) = [p for p in the(report, name).where if p.type == "call_site" and p.name == call]
    assert place.file is not None
    assert place.line is not None
    folder = Path(__file__).parent
    return (folder / Path(place.file).name).read_text().splitlines()[place.line - 1].strip()
