"""The course of the loss scale: which of the seven verdicts a run gets, and which it must not get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaudit.analysis.report import AuditReport
from tests.findings.conftest import Script
from tests.findings.training import (
    NUM_CLASSES,
    WIDTH,
    alarming,
    assert_healthy,
    assert_sound,
    classes,
    classification,
    convnet,
    copying,
    dynamic,
    encoder,
    evidence,
    first_token,
    fit,
    informing,
    mlp,
    numbers,
    picture_classification,
    recurrent,
    the,
)

Audited = Callable[[Script], AuditReport]


# calibration


def start_at_2_to_the_32(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(init_scale=2.0**32), every=10)


def convolutions_start_at_2_to_the_40(path: Path) -> AuditReport:
    return fit(path, convnet(), picture_classification, scaler=dynamic(init_scale=2.0**40), every=10)


def recurrent_net_starts_far_too_high_with_a_gentle_backoff(path: Path) -> AuditReport:
    scaler = dynamic(init_scale=2.0**28, backoff_factor=0.7)
    return fit(path, recurrent(), first_token, scaler=scaler, every=10, steps=80)


@pytest.mark.parametrize(
    "script",
    [
        start_at_2_to_the_32,
        convolutions_start_at_2_to_the_40,
        recurrent_net_starts_far_too_high_with_a_gentle_backoff,
    ],
)
def test_a_scale_that_comes_down_from_far_too_high_is_normal(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_healthy(report)
    assert "scale-calibration" in informing(report) <= {"scale-calibration", "gradient-headroom-low"}
    finding = the(report, "scale-calibration")
    num_overflows = evidence(finding)["num_overflows"]
    assert 10 <= num_overflows <= report.run.num_skipped <= num_overflows + 2
    assert evidence(finding)["scale_before"] == report.run.scale_first
    assert report.run.scale_last is not None
    assert report.run.scale_last <= evidence(finding)["scale_after"] <= 4 * report.run.scale_last
    assert finding.steps[0] == 0


def test_a_run_that_ends_while_the_scale_still_comes_down_is_no_collapse(tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), scaler=dynamic(init_scale=2.0**60), steps=12, every=1)

    assert report.run.num_skipped == 12
    assert_healthy(report)
    assert informing(report) == {"scale-calibration"}


# hunting


def growth_interval_of_20(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(growth_interval=20), steps=300, every=20)


def attention_with_a_growth_interval_of_10(path: Path) -> AuditReport:
    return fit(path, encoder(), copying, scaler=dynamic(growth_interval=10), steps=200, every=20)


def summed_loss_hunts_below_one(path: Path) -> AuditReport:
    model = mlp(1, out=4)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = numbers(step, 512, WIDTH)
        return (model(x).float() - 1000 * (1 + x[:, :4])).square().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    return fit(path, model, loss, scaler=dynamic(growth_interval=20), optimizer=optimizer, steps=200, every=20)


@pytest.mark.parametrize(
    "script", [growth_interval_of_20, attention_with_a_growth_interval_of_10, summed_loss_hunts_below_one]
)
def test_probing_for_a_larger_scale_now_and_then_is_normal(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_healthy(report)
    assert informing(report) <= {"scale-hunting", "gradient-headroom-low"}
    numbers = evidence(the(report, "scale-hunting"))
    assert 0 < numbers["skip_rate"] < 0.12
    assert numbers["num_growths"] >= 3


def test_a_scale_may_hunt_below_one(audited: Audited) -> None:
    report = audited(summed_loss_hunts_below_one)

    assert max(scale for step, scale in report.history.scale_points if step > 100) < 1.0


# thrashing


def scale_put_back_every_epoch(path: Path) -> AuditReport:
    scaler = dynamic()

    def after(step: int) -> None:
        if step % 25 == 24:
            scaler.update(2.0**28)

    return fit(path, convnet(), picture_classification, scaler=scaler, steps=200, every=10, after=after)


def scale_doubled_by_hand(path: Path) -> AuditReport:
    scaler = dynamic()

    def after(step: int) -> None:
        if step % 4 == 3:
            scaler.update(2 * scaler.get_scale())

    return fit(path, encoder(), copying, scaler=scaler, steps=200, every=10, after=after)


def interval_shortened_behind_the_scalers_back(path: Path) -> AuditReport:
    scaler = dynamic()

    def after(step: int) -> None:
        if step == 0:
            scaler.set_growth_interval(2)

    return fit(path, mlp(), scaler=scaler, steps=200, every=10, after=after)


def new_scaler_every_epoch(path: Path) -> AuditReport:
    import gradaudit

    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with gradaudit.attach(model, optimizer, out=path, every=10) as audit:
        for epoch in range(8):
            scaler = dynamic(init_scale=2.0**28)
            for step in range(25):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = classification(model, 25 * epoch + step)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return audit.report()


def floor_above_what_many_batches_bear(path: Path) -> AuditReport:
    """Batches differ by 2^10 in the size of their gradients, and the floor suits the small ones."""
    scaler = dynamic()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * 2.0 ** (-10 * (step % 3 > 0))

    def after(step: int) -> None:
        if scaler.get_scale() < 2.0**21:
            scaler.update(2.0**21)

    return fit(path, mlp(), loss, scaler=scaler, steps=150, every=10, after=after)


@pytest.mark.parametrize(
    "script",
    [
        scale_put_back_every_epoch,
        scale_doubled_by_hand,
        interval_shortened_behind_the_scalers_back,
        new_scaler_every_epoch,
        floor_above_what_many_batches_bear,
    ],
)
def test_skipping_far_more_often_than_the_interval_implies_is_thrashing(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("scale-thrashing") == "warning"
    assert set(alarming(report)) <= {"scale-thrashing", "gradient-overflow"}
    finding = the(report, "scale-thrashing")
    assert finding.scale_can_fix == "yes"
    assert evidence(finding)["num_overflows"] >= 10
    assert evidence(finding)["skip_rate"] > 10 * 1 / 2001
    assert evidence(finding)["num_bursts"] >= 5
    assert report.recommendation is not None
    assert report.recommendation.change_needed
    assert report.recommendation.precision == "fp16"
    assert report.recommendation.predicted.num_skipped < report.run.num_skipped / 2


# decay


def loss_weight_grows(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * 1.12**step

    return fit(path, mlp(), loss, scaler=dynamic(), steps=200, every=5)


class Residual(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def residual(blocks: int = 6) -> Residual:
    torch.manual_seed(0)
    return Residual(blocks)


def weights_of_a_residual_net_grow(path: Path) -> AuditReport:
    """As with a learning rate too high and no decay: every block multiplies the gradient a little more each step."""
    model = residual()

    def after(step: int) -> None:
        with torch.no_grad():
            for block in model.blocks:
                block.weight.mul_(1.012)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        # the size of the logits does not grow along, as behind a norm
        return (model(numbers(step, 32, WIDTH)).float() * numbers(step + 1, 32, NUM_CLASSES)).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return fit(path, model, loss, scaler=dynamic(), optimizer=optimizer, steps=150, every=5, after=after)


@pytest.mark.parametrize("script", [loss_weight_grows, weights_of_a_residual_net_grow])
def test_a_scale_that_drifts_down_while_gradients_grow_is_decay(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("scale-decay") == "warning"
    assert set(alarming(report)) <= {"scale-decay", "gradient-overflow"}
    finding = the(report, "scale-decay")
    assert finding.scale_can_fix == "partly"
    numbers = evidence(finding)
    assert numbers["num_drops"] >= 3
    assert numbers["gradient_growth"] > 3
    assert numbers["scale_before"] >= 8 * numbers["scale_after"]


def loss_grows_once(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (1000.0 if step >= 60 else 1.0)

    return fit(path, mlp(), loss, scaler=dynamic(), steps=180)


def single_batches_are_much_larger(path: Path) -> AuditReport:
    """Their gradients are finite at a smaller scale, however far they lie above their neighbours'."""

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (2.0**14 if step % 25 == 24 else 1.0)

    return fit(path, mlp(), loss, scaler=dynamic(), steps=250, every=10)


def test_one_drop_is_no_decay(audited: Audited) -> None:
    report = audited(loss_grows_once)

    assert report.run.num_skipped >= 3
    assert_healthy(report)


def test_a_few_batches_much_larger_than_the_rest_are_no_collapse(audited: Audited) -> None:
    report = audited(single_batches_are_much_larger)

    assert_sound(report)
    assert report.run.num_skipped >= 6
    assert "scale-collapse" not in alarming(report)
    assert report.verdict.level != "failing"
    assert all(finding.scale_can_fix != "no" for finding in report.findings)


# collapse


class Gated(nn.Module):
    """The product of two branches: in FP16 it overflows once the branches have grown."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.gate(x) * self.value(x))
        return logits


def product_overflows_from_step_40_on(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x * (500 if step >= 40 else 1)), y)

    return fit(path, Gated(), loss, scaler=dynamic(), steps=80)


def logits_overflow_from_the_start(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(torch.exp(15 + torch.tanh(model(x))), y)

    return fit(path, mlp(), loss, scaler=dynamic(growth_interval=50), steps=60)


def every_third_row_is_masked_entirely(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        scores = model(x)
        if step % 3 == 0:
            scores = scores + torch.where(torch.arange(len(x))[:, None] < 2, float("-inf"), 0.0)
        return F.nll_loss(torch.log(torch.softmax(scores, dim=1) + 1e-3), y)

    return fit(path, mlp(), loss, scaler=dynamic(), steps=90)


def square_root_of_zero(path: Path) -> AuditReport:
    """The loss is finite and its gradient is inf times zero, at every scale."""

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        out = model(x)
        distance = (out - out.detach()).square().sum(1).sqrt() if step >= 20 else out.new_zeros(())
        return F.cross_entropy(out, y) + distance.float().mean()

    return fit(path, mlp(), loss, scaler=dynamic(), steps=80)


def square_root_of_zero_from_the_start(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, _ = classes(step)
        hidden = model(x)
        return (hidden - hidden.detach()).square().sum(1).sqrt().float().mean()

    return fit(path, mlp(3, seed=3), loss, scaler=dynamic(), steps=50)


def collapse_with_a_gentle_backoff(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x * (500 if step >= 20 else 1)), y)

    return fit(path, Gated(), loss, scaler=dynamic(backoff_factor=0.9), steps=60)


@pytest.mark.parametrize(
    ("script", "born_in_forward"),
    [
        (product_overflows_from_step_40_on, True),
        (logits_overflow_from_the_start, True),
        (every_third_row_is_masked_entirely, True),
        (collapse_with_a_gentle_backoff, True),
        (square_root_of_zero, False),
        (square_root_of_zero_from_the_start, False),
    ],
)
def test_halvings_that_no_scale_can_stop_are_a_collapse(
    script: Script, born_in_forward: bool, audited: Audited
) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report) == {"scale-collapse": "error"}
    finding = the(report, "scale-collapse")
    assert finding.scale_can_fix == "no"
    numbers = evidence(finding)
    assert numbers["num_unexplained_overflows"] >= 25
    assert numbers["scale_after"] < numbers["scale_before"]
    assert (numbers["num_nonfinite_losses"] == numbers["num_unexplained_overflows"]) is born_in_forward
    assert report.recommendation is not None
    assert report.recommendation.change_needed
    assert report.recommendation.precision != "fp16"


def test_the_collapse_begins_where_the_first_bad_step_was(audited: Audited) -> None:
    assert the(audited(product_overflows_from_step_40_on), "scale-collapse").steps == (40, 79)
    assert the(audited(square_root_of_zero), "scale-collapse").steps == (20, 79)


def test_a_burst_of_bad_batches_that_ended_is_no_collapse(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (float("nan") if 50 <= step < 56 else 1.0)

    report = fit(tmp_path / "run", mlp(), loss, scaler=dynamic(), steps=150)

    assert report.run.num_skipped == 6
    assert_healthy(report)


# at the floor


def forward_overflows_above_a_floor_of_one(path: Path) -> AuditReport:
    torch.manual_seed(0)
    scaler = dynamic()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x * (500 if step >= 15 else 1)), y)

    def after(step: int) -> None:
        if scaler.get_scale() < 1.0:
            scaler.update(1.0)

    return fit(path, Gated(), loss, scaler=scaler, steps=80, after=after)


def backward_is_nan_above_a_floor_of_128(path: Path) -> AuditReport:
    scaler = dynamic()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens = torch.arange(48).view(8, 6) % 20
        logits = model(tokens)
        return copying(model, step) + (logits - logits.detach()).square().sum(-1).sqrt().float().mean()

    def after(step: int) -> None:
        scaler.update(max(scaler.get_scale(), 128.0))

    return fit(path, encoder(), loss, scaler=scaler, steps=60, after=after)


@pytest.mark.parametrize("script", [forward_overflows_above_a_floor_of_one, backward_is_nan_above_a_floor_of_128])
def test_overflowing_without_end_at_the_floor_is_told_as_such(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report) == {"scale-at-floor": "error"}
    finding = the(report, "scale-at-floor")
    assert finding.scale_can_fix == "no"
    assert evidence(finding)["scale"] == report.run.scale_last
    assert evidence(finding)["num_overflows"] >= 30
    assert report.recommendation is not None
    assert report.recommendation.precision != "fp16"


def static_without_overflow(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(init_scale=1024.0, growth_interval=10**9), steps=80)


def held_by_hand_without_overflow(path: Path) -> AuditReport:
    scaler = dynamic(init_scale=2.0**12)
    return fit(path, encoder(), copying, scaler=scaler, steps=80, update=lambda: scaler.update(2.0**12))


@pytest.mark.parametrize("script", [static_without_overflow, held_by_hand_without_overflow])
def test_a_static_scale_without_overflow_is_fine(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert report.run.num_skipped == 0
    assert_healthy(report)
    assert informing(report) == set()


# zero


def nan_until_the_scale_is_zero(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (float("nan") if step >= 10 else 1.0)

    return fit(path, mlp(1), loss, scaler=dynamic(), steps=190, every=20)


def nan_until_the_scale_is_nothing_then_clean(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (float("nan") if 10 <= step < 60 else 1.0)

    return fit(path, mlp(1), loss, scaler=dynamic(backoff_factor=0.1), steps=80, every=20)


@pytest.mark.parametrize("script", [nan_until_the_scale_is_zero, nan_until_the_scale_is_nothing_then_clean])
def test_a_scale_of_nothing_is_told_before_anything_else(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report)["scale-zero"] == "error"
    assert set(alarming(report)) <= {"scale-zero", "gradient-underflow"}
    finding = the(report, "scale-zero")
    assert finding.scale_can_fix == "no"
    assert evidence(finding)["scale"] <= 2.0**-128
    assert report.recommendation is not None
    assert report.recommendation.precision != "fp16"
