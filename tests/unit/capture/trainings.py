"""Small trainings, recorded, for the tests of capture."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradaudit
from gradaudit.capture.recording import Recording
from gradaudit.capture.settings import CaptureSettings
from gradaudit.store import Run, TensorInfo, open_run

WIDTH = 8


def net() -> nn.Sequential:
    """Two linear layers with weights that do not depend on the test's place in the session."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def batch(i: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, WIDTH)), generator=torch.Generator().manual_seed(i))


def scaler(**more: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**8, **more})


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    *,
    i: int = 0,
    poison: tuple[int, ...] = (),
) -> torch.Tensor:
    """One FP16 step; the gradients of the parameters numbered in `poison` become infinite."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(batch(i)).float().square().mean()
    (scaler.scale(loss) if scaler else loss).backward()
    for index in poison:
        grad = list(model.parameters())[index].grad
        assert grad is not None
        grad.view(-1)[0] = torch.inf
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    return loss.detach()


def record(folder: Path, train: Callable[[], Any], *, model: nn.Module | None = None, **options: Any) -> Run:
    """Record what `train` does: as `attach(model)` would, or without a model as `gradaudit run` does."""
    if model is not None:
        opened: Any = gradaudit.attach(model, out=folder, **options)
    else:
        opened = Recording(folder, CaptureSettings(**options), argv=["train.py"], force=False)
    with ExitStack() as stack:
        stack.callback(opened.close)
        train()
    run = open_run(folder)
    assert run.meta["errors"] == []
    return run


def by_name(run: Run, kind: str) -> dict[str, TensorInfo]:
    """Tensors of one kind by fqn and operation."""
    return {tensor.label: tensor for tensor in run.tensors() if tensor.kind == kind}


def names(run: Run, ids: Any) -> list[str]:
    """Their fqns."""
    return [run.tensors()[int(i)].fqn for i in ids]
