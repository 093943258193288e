"""scale, backward, unscale_, step, update: each call out of place, and the right loop that looks most like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradaudit
from gradaudit.analysis.report import AuditReport
from tests.findings.loops import STEPS, Body, line, loss_of, train
from tests.findings.training import (
    WIDTH,
    alarming,
    assert_healthy,
    assert_sound,
    dynamic,
    evidence,
    half,
    mlp,
    numbers,
    the,
)

# step-bypasses-scaler


def stepped_directly(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step) * 1e-4).backward()
    optimizer.step()


def stepped_twice(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.step()


def divided_by_hand(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    for p in model.parameters():
        p.grad.div_(scaler.get_scale())
    optimizer.step()


@pytest.mark.parametrize("body", [stepped_directly, stepped_twice])
def test_a_direct_step_is_found(tmp_path: Path, body: Body) -> None:
    report = train(tmp_path / "run", body)
    assert_sound(report)
    assert alarming(report)["step-bypasses-scaler"] == "error"
    assert the(report, "step-bypasses-scaler").consequence_of is None
    assert line(report, "step-bypasses-scaler", "optimizer.step") == "optimizer.step()"


def test_gradients_that_the_script_divides_itself_may_be_stepped_on(tmp_path: Path) -> None:
    report = train(tmp_path / "run", divided_by_hand)
    assert "step-bypasses-scaler" not in alarming(report)


def test_an_optimizer_outside_the_scaler_is_healthy(tmp_path: Path) -> None:
    model, other = mlp(), nn.Linear(4, 4)
    with gradaudit.attach(model, out=tmp_path / "run", every=5) as audit:
        optimizer, plain, scaler = torch.optim.SGD(model.parameters()), torch.optim.SGD(other.parameters()), dynamic()
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            plain.zero_grad()
            other(numbers(step, 8, 4)).square().mean().backward()
            plain.step()
    assert_healthy(audit.report())


# unscaled-backward


def one_loss_unscaled(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    (loss_of(model, step + 1000) * 0.1).backward()
    scaler.step(optimizer)
    scaler.update()


def scaled_and_forgotten(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    loss = loss_of(model, step)
    scaler.scale(loss)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()


def never_scaled(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    loss_of(model, step).backward()
    scaler.step(optimizer)
    scaler.update()


def scaled_by_hand(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    if step == 0:
        scaler.scale(torch.zeros(()))
    (loss_of(model, step) * scaler.get_scale()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("body", "raises"), [(one_loss_unscaled, None), (scaled_and_forgotten, None), (never_scaled, "_scale is None")]
)
def test_an_unscaled_backward_is_found(tmp_path: Path, body: Body, raises: str | None) -> None:
    report = train(tmp_path / "run", body, raises=raises)
    assert alarming(report)["unscaled-backward"] == "error"
    assert the(report, "unscaled-backward").consequence_of is None
    assert line(report, "unscaled-backward", "backward").endswith(".backward()")


def test_a_loss_multiplied_by_the_scale_by_hand_is_scaled(tmp_path: Path) -> None:
    report = train(tmp_path / "run", scaled_by_hand)
    assert {"unscaled-backward", "step-bypasses-scaler"}.isdisjoint(alarming(report))


# update-inside-accumulation


def unscaled_between_micro_batches(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, 2 * step)).backward()
    scaler.unscale_(optimizer)
    scaler.scale(loss_of(model, 2 * step + 1)).backward()
    scaler.step(optimizer)
    scaler.update()


def updated_every_micro_batch(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    for micro in range(2):
        scaler.scale(loss_of(model, 2 * step + micro)).backward()
        scaler.update()
    scaler.step(optimizer)


def accumulated(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    for micro in range(3):
        scaler.scale(loss_of(model, 3 * step + micro) / 3).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("body", "raises"),
    [(unscaled_between_micro_batches, None), (updated_every_micro_batch, "No inf checks were recorded prior")],
)
def test_a_division_inside_accumulation_is_found(tmp_path: Path, body: Body, raises: str | None) -> None:
    report = train(tmp_path / "run", body, raises=raises)
    assert alarming(report)["update-inside-accumulation"] == "error"


def test_accumulation_is_healthy(tmp_path: Path) -> None:
    assert_healthy(train(tmp_path / "run", accumulated, growth_interval=5))


class Pair(nn.Module):
    """A generator and a discriminator of noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.d = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def gan(
    path: Path,
    *,
    losses_first: bool = False,
    two_scalers: bool = False,
    crossed: bool = False,
    update_each: bool = False,
    empty_by_module: bool = False,
) -> AuditReport:
    pair, criterion = Pair(), nn.BCEWithLogitsLoss()
    with gradaudit.attach(pair, out=path, every=5) as audit:
        opt_d, opt_g = (torch.optim.Adam(net.parameters(), 1e-3) for net in (pair.d, pair.g))
        for_d = dynamic(growth_interval=3)
        for_g = dynamic(growth_interval=5) if two_scalers else for_d

        def loss_d(step: int) -> torch.Tensor:
            with half():
                real, fake = pair.d(numbers(step, 16, WIDTH)), pair.d(pair.g(numbers(step, 16, 8)).detach())
            return criterion(real.float(), torch.ones(16, 1)) + criterion(fake.float(), torch.zeros(16, 1))

        def loss_g(step: int) -> torch.Tensor:
            with half():
                fake = pair.d(pair.g(numbers(step, 16, 8)))
            return criterion(fake.float(), torch.ones(16, 1))

        for_d.scale(torch.zeros(()))  # else torch refuses a scaler that never scaled anything
        for step in range(STEPS):
            (pair.d if empty_by_module else opt_d).zero_grad()
            (pair.g if empty_by_module else opt_g).zero_grad()
            (for_g if crossed else for_d).scale(loss_d(step)).backward()
            if losses_first:
                for_g.scale(loss_g(step)).backward(inputs=list(pair.g.parameters()))
            for_d.step(opt_d)
            if two_scalers or losses_first or update_each:
                for_d.update()
            if not losses_first:
                (pair.g if empty_by_module else opt_g).zero_grad()
                for_g.scale(loss_g(step)).backward()
            for_g.step(opt_g)
            for_g.update()
    return audit.report()


def test_an_update_between_two_steps_that_were_prepared_together(tmp_path: Path) -> None:
    report = gan(tmp_path / "run", losses_first=True)
    assert set(alarming(report)) == {"update-inside-accumulation"}
    assert line(report, "update-inside-accumulation", "scaler.update") == "for_d.update()"


@pytest.mark.parametrize(
    "how",
    [{}, {"two_scalers": True}, {"update_each": True}, {"empty_by_module": True, "update_each": True}],
    ids=["one update", "one scaler each", "update after each", "emptied by the modules"],
)
def test_a_gan_is_healthy(tmp_path: Path, how: dict[str, bool]) -> None:
    report = gan(tmp_path / "run", **how)
    assert alarming(report) == {}


def test_a_loss_scaled_by_the_other_scaler_is_found(tmp_path: Path) -> None:
    report = gan(tmp_path / "run", two_scalers=True, crossed=True)
    assert alarming(report) == {"several-scalers": "warning"}
    assert "for_d.step(opt_d)" in line(report, "several-scalers", "scaler.step")


# missing-update, double-unscale


def given_up_without_update(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    scaler.unscale_(optimizer)
    if step != 9:
        scaler.step(optimizer)
        scaler.update()


def given_up_with_update(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    scaler.unscale_(optimizer)
    if step != 9:
        scaler.step(optimizer)
    scaler.update()


def never_updated(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    scaler.step(optimizer)


def unscaled_for_every_micro_batch(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    for micro in range(2):
        scaler.scale(loss_of(model, 2 * step + micro)).backward()
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("body", "raises", "name", "call"),
    [
        (given_up_without_update, "unscale_.. has already", "missing-update", "scaler.unscale_(optimizer)"),
        (never_updated, "step.. has already", "missing-update", "scaler.step(optimizer)"),
        (unscaled_for_every_micro_batch, "unscale_.. has already", "double-unscale", "scaler.unscale_(optimizer)"),
    ],
)
def test_what_torch_refuses_is_explained(tmp_path: Path, body: Body, raises: str, name: str, call: str) -> None:
    report = train(tmp_path / "run", body, raises=raises)
    assert alarming(report) == {name: "error"}
    assert line(report, name, "scaler.step" if "step" in call else "scaler.unscale_") == call


def test_where_update_was_left_out_is_said(tmp_path: Path) -> None:
    report = train(tmp_path / "run", given_up_without_update, raises="unscale_.. has already")
    assert "at step 9" in the(report, "missing-update").summary


def test_a_step_that_the_script_gives_up_is_healthy(tmp_path: Path) -> None:
    assert_healthy(train(tmp_path / "run", given_up_with_update))


# hysteresis-growth-bug


def updated_before_the_division(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    if step:
        scaler.update()
    scaler.step(optimizer)


def updated_after_the_step(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    scaler.step(optimizer)
    scaler.update()


def test_gradients_divided_by_the_next_scale_are_found(tmp_path: Path) -> None:
    report = train(tmp_path / "run", updated_before_the_division, growth_interval=6, init_scale=256.0)
    finding = the(report, "hysteresis-growth-bug")
    assert finding.severity == "info"
    assert evidence(finding)["scale_ratio"] == 2.0


def test_a_scale_that_grows_after_the_step_is_healthy(tmp_path: Path) -> None:
    assert_healthy(train(tmp_path / "run", updated_after_the_step, growth_interval=6, init_scale=256.0))
