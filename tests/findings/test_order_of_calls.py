"""Who steps, with which scaler, on which gradients, and what the schedule does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradaudit
from gradaudit.analysis.report import AuditReport
from tests.findings.loops import STEPS, line, loss_of, train
from tests.findings.training import (
    WIDTH,
    alarming,
    assert_healthy,
    dynamic,
    evidence,
    half,
    mlp,
    numbers,
    places,
    the,
)

# scaler-recreated


def scalers(path: Path, *, new_scaler: bool, new_optimizer: bool) -> AuditReport:
    model = mlp()
    with gradaudit.attach(model, out=path, every=5) as audit:
        optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), dynamic()
        for step in range(STEPS):
            if step % 6 == 0 and step and new_scaler:
                scaler = dynamic()
            if step % 6 == 0 and step and new_optimizer:
                optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
    return audit.report()


def test_a_scaler_for_every_epoch_is_found(tmp_path: Path) -> None:
    report = scalers(tmp_path / "run", new_scaler=True, new_optimizer=False)
    assert alarming(report) == {"scaler-recreated": "error"}
    assert evidence(the(report, "scaler-recreated"))["num_scalers"] == 4


@pytest.mark.parametrize("folds", [True, False])
def test_a_scaler_for_every_optimizer_is_healthy(tmp_path: Path, folds: bool) -> None:
    assert_healthy(scalers(tmp_path / "run", new_scaler=folds, new_optimizer=True))


# optimizer-without-gradients


def lost_gradients(path: Path, spoil: Callable[[nn.Module, Any], Any], *, before_step: bool = False) -> AuditReport:
    model = mlp()
    with gradaudit.attach(nn.Identity(), out=path, every=5) as audit:
        optimizer, scaler = torch.optim.SGD(model.parameters()), dynamic()
        used = model if before_step else spoil(model, optimizer)
        scaler.scale(loss_of(used, 0)).backward()
        if before_step:
            spoil(model, optimizer)
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            scaler.step(optimizer)
    return audit.report()


def copied(model: nn.Module, optimizer: Any) -> nn.Module:
    other = mlp(seed=1)
    other.load_state_dict(model.state_dict())
    return other


def emptied(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def frozen(model: nn.Module, optimizer: Any) -> nn.Module:
    model.requires_grad_(False)
    return nn.Sequential(model, nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("spoil", "before_step", "words"),
    [(copied, False, "copied"), (emptied, True, "zero_grad was called between"), (frozen, False, "frozen")],
)
def test_an_optimizer_without_gradients_is_explained(
    tmp_path: Path, spoil: Callable[[nn.Module, Any], Any], before_step: bool, words: str
) -> None:
    report = lost_gradients(tmp_path / "run", spoil, before_step=before_step)
    finding = the(report, "optimizer-without-gradients")
    assert words in finding.summary
    assert {"scaler.step", "SGD"} <= places(finding)


def test_a_fused_optimizer_without_gradients_is_found_though_nothing_raises(tmp_path: Path) -> None:
    model, other = mlp(), nn.Linear(4, 4)
    with gradaudit.attach(model, out=tmp_path / "run", every=5) as audit:
        optimizer, idle = torch.optim.SGD(model.parameters()), torch.optim.Adam(other.parameters(), fused=True)
        scaler = dynamic()
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.step(idle)
            scaler.update()
    assert "optimizer-without-gradients" in alarming(audit.report())


def half_used(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model[2:], step)).backward()
    scaler.step(optimizer)
    scaler.update()


def test_an_optimizer_with_some_gradients_is_no_such_case(tmp_path: Path) -> None:
    report = train(tmp_path / "run", half_used)
    assert "optimizer-without-gradients" not in alarming(report)


# never-applied


def with_a_head(path: Path, *, spoilt: bool, fused: bool = False, **scaler: Any) -> AuditReport:
    model, head = mlp(), nn.Linear(8, 8)
    with gradaudit.attach(model, out=path, every=5) as audit:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        of_head = torch.optim.Adam(head.parameters(), fused=fused)
        grad_scaler = dynamic(**scaler)
        for step in range(30):
            optimizer.zero_grad()
            of_head.zero_grad()
            loss = loss_of(model, step)
            with half():
                aside = head(model(numbers(step, 8, WIDTH)).detach()).float().mean()
            # the square root of zero: a gradient of inf at any scale
            aside = aside + (head.weight * 0).sum().abs().sqrt() if spoilt else aside
            grad_scaler.scale(loss + aside).backward()
            grad_scaler.step(optimizer)
            grad_scaler.step(of_head)
            grad_scaler.update()
    return audit.report()


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_never_applied_a_step_is_found(tmp_path: Path, fused: bool) -> None:
    report = with_a_head(tmp_path / "run", spoilt=True, fused=fused)
    finding = the(report, "never-applied")
    assert finding.severity == "error"
    assert "Adam" in places(finding)
    assert "SGD" not in places(finding)


def test_a_long_search_for_the_scale_is_no_failure(tmp_path: Path) -> None:
    assert "never-applied" not in alarming(with_a_head(tmp_path / "run", spoilt=False, init_scale=2.0**60))


# scheduler-ahead


def scheduled(path: Path, *, only_applied: bool = False, **scaler: Any) -> AuditReport:
    model = mlp()
    with gradaudit.attach(model, out=path, every=5) as audit:
        optimizer, grad_scaler = torch.optim.SGD(model.parameters(), 1e-3), dynamic(**scaler)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        for step in range(40):
            optimizer.zero_grad()
            grad_scaler.scale(loss_of(model, step)).backward()
            grad_scaler.step(optimizer)
            before = grad_scaler.get_scale()
            grad_scaler.update()
            if not only_applied or grad_scaler.get_scale() >= before:
                schedule.step()
    return audit.report()


def test_a_schedule_that_advances_on_skipped_steps_is_found(tmp_path: Path) -> None:
    report = scheduled(tmp_path / "run", init_scale=2.0**40)
    assert "scheduler-ahead" in alarming(report)
    assert line(report, "scheduler-ahead", "lr_scheduler.step") == "schedule.step()"


@pytest.mark.parametrize("how", [{"init_scale": 2.0**40, "only_applied": True}, {"init_scale": 2.0**20}])
def test_a_schedule_that_keeps_up_is_healthy(tmp_path: Path, how: dict[str, Any]) -> None:
    assert "scheduler-ahead" not in alarming(scheduled(tmp_path / "run", **how))


# scaled-gradient-penalty


def penalised(path: Path, *, unscaled: bool) -> AuditReport:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    with gradaudit.attach(model, out=path, every=5) as audit:
        optimizer, scaler = torch.optim.Adam(model.parameters(), 1e-3), dynamic(init_scale=256.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = numbers(step, 16, WIDTH).requires_grad_()
            with half():
                loss = model(x).float().square().mean()
            (grad,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
            if unscaled:
                grad = grad / scaler.get_scale()
            penalty = (grad.norm(dim=1) - 1).square().mean()
            scaler.scale(loss + 0.1 * penalty).backward()
            scaler.step(optimizer)
            scaler.update()
    return audit.report()


def test_a_penalty_of_scaled_gradients_is_found(tmp_path: Path) -> None:
    report = penalised(tmp_path / "run", unscaled=False)
    assert "scaled-gradient-penalty" in alarming(report)
    assert "autograd.grad" in line(report, "scaled-gradient-penalty", "autograd.grad")


def test_a_penalty_of_unscaled_gradients_is_not(tmp_path: Path) -> None:
    assert "scaled-gradient-penalty" not in alarming(penalised(tmp_path / "run", unscaled=True))
