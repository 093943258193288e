"""Numbers that went bad outside the forward: in the batch, in buffers, in weights, or by divergence; each beside its
look-alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradaudit
from gradaudit.analysis.report import AuditReport
from tests.findings.training import (
    Loss,
    alarming,
    assert_sound,
    classes,
    classification,
    dynamic,
    evidence,
    fit,
    half,
    mlp,
    numbers,
    places,
    the,
    times,
)

INTEGRITY = {"nonfinite-input", "nonfinite-buffer", "nonfinite-weight", "divergence"}


def of_integrity(report: AuditReport) -> set[str]:
    assert_sound(report)
    return {finding.id for finding in report.findings} & INTEGRITY


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# The batch


def with_bad_inputs(bad: Callable[[int], bool], value: float) -> Loss:
    batches = []
    for step in range(40):
        x, y = classes(step)
        if bad(step):
            x[1, 3] = value
        batches.append((x, y))

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = batches[step]
        return F.cross_entropy(model(x).float(), y)

    return loss


def test_one_batch_with_nan_is_named_by_its_step(tmp_path: Path) -> None:
    report = fit(
        tmp_path / "run", mlp(), with_bad_inputs(lambda step: step == 17, torch.nan), steps=40, scaler=dynamic()
    )
    assert of_integrity(report) == {"nonfinite-input"}
    finding = the(report, "nonfinite-input")
    assert (finding.severity, finding.steps, finding.scale_can_fix) == ("error", (17, 17), "no")
    assert alarming(report) == {"nonfinite-input": "error"}


def test_inf_in_every_batch_leads_and_says_how_much(tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), with_bad_inputs(lambda step: step > 4, torch.inf), steps=30, scaler=dynamic())
    assert of_integrity(report) == {"nonfinite-input"}
    finding = the(report, "nonfinite-input")
    assert report.findings[0].id == "nonfinite-input"
    assert all(other.consequence_of == "nonfinite-input" for other in report.findings[1:])
    assert evidence(finding)["num_inf"] == 1
    assert evidence(finding)["num_steps"] == 25
    assert any(place.file is not None and place.file.endswith("test_integrity.py") for place in finding.where)


def test_targets_with_nan_count_as_well(tmp_path: Path) -> None:
    targets = [numbers(step, 32, 8) for step in range(30)]
    for target in targets[6:]:
        target[0, 0] = torch.nan

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return F.mse_loss(model(classes(step)[0]).float(), targets[step])

    report = fit(tmp_path / "run", mlp(), loss, steps=30, scaler=dynamic())
    assert of_integrity(report) == {"nonfinite-input"}
    assert the(report, "nonfinite-input").steps[0] == 6


class Masked(nn.Module):
    """Attention over places that a mask of -inf, given with the batch, leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(32, 32)
        self.score = nn.Linear(32, 1)
        self.out = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inside(x))
        weights = torch.softmax(self.score(hidden).squeeze(-1) + mask, -1)
        out: torch.Tensor = self.out((weights.unsqueeze(-1) * hidden).sum(1))
        return out


def masked(model: nn.Module, step: int) -> torch.Tensor:
    x = numbers(step, 16, 6, 32)
    mask = torch.zeros(16, 6).masked_fill(torch.arange(6)[None] > torch.arange(16)[:, None] % 6, -torch.inf)
    return F.cross_entropy(model(x, mask).float(), x[:, 0, :8].argmax(1))


def masked_with_an_overflow(model: nn.Module, step: int) -> torch.Tensor:
    return masked(model, step) * (1e30 if step == 15 else 1)


def imputing(model: nn.Module, step: int) -> torch.Tensor:
    x, y = classes(step)
    x[0, 0] = torch.nan
    return F.cross_entropy(model(x).float(), y)


class Imputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inside(torch.where(x.isnan(), 0.0, x))
        return out


@pytest.mark.parametrize(
    ("make", "loss", "scale"),
    [
        (Masked, masked, 65536.0),
        (Masked, masked, 2.0**30),
        (Masked, masked_with_an_overflow, 65536.0),
        (Imputes, imputing, 65536.0),
    ],
    ids=["mask", "mask and a high start", "mask and an overflow", "NaN that the model fills"],
)
def test_what_is_non_finite_on_purpose_is_fine(
    tmp_path: Path, make: Callable[[], nn.Module], loss: Loss, scale: float
) -> None:
    torch.manual_seed(0)
    report = fit(tmp_path / "run", make(), loss, steps=30, scaler=dynamic(init_scale=scale))
    assert of_integrity(report) == set()


def test_a_loss_module_that_is_given_an_overflow_is_not_the_batch(tmp_path: Path) -> None:
    criterion = nn.CrossEntropyLoss()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return criterion(model(x * (1e7 if step > 5 else 1)).float(), y)

    report = fit(tmp_path / "run", mlp(), loss, steps=20, scaler=dynamic())
    assert of_integrity(report) == set()
    assert "forward-overflow" in alarming(report)


def test_features_of_a_frozen_model_that_overflow_are_not_put_down_to_the_data(tmp_path: Path) -> None:
    frozen = mlp(out=32).half().requires_grad_(False)
    for layer in frozen:
        if isinstance(layer, nn.Linear):
            layer.weight.data.mul_(60)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        with torch.no_grad():
            features = frozen(x.half())
        return F.cross_entropy(model(features).float(), y)

    report = fit(tmp_path / "run", nn.Linear(32, 8), loss, steps=24, scaler=dynamic())
    finding = the(report, "nonfinite-input")
    assert finding.confidence == "medium"
    assert "overflowed in a cast or in a frozen model" in finding.summary


# Buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


def one_huge_batch(model: nn.Module, step: int) -> torch.Tensor:
    x, y = classes(step)
    if step == 18:
        x[0] = 6e4
    return F.cross_entropy(model(x).float(), y)


def test_statistics_of_a_norm_that_a_skipped_step_has_spoilt(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normed()
    report = fit(tmp_path / "run", model, one_huge_batch, steps=40, scaler=dynamic())
    assert not model.norm.running_var.isfinite().all()
    assert all(param.isfinite().all() for param in model.parameters())
    assert of_integrity(report) == {"nonfinite-buffer"}
    finding = the(report, "nonfinite-buffer")
    assert finding.severity == "error"
    assert finding.steps[0] <= 18 <= finding.steps[1]
    assert places(finding) == {"norm"}
    assert "norm (BatchNorm1d)" in finding.summary
    assert "step 18 was skipped" in finding.summary


def one_large_loss(model: nn.Module, step: int) -> torch.Tensor:
    return classification(model, step) * (1e9 if step == 18 else 1)


def test_a_skipped_step_whose_forward_was_fine_leaves_buffers_alone(tmp_path: Path) -> None:
    report = fit(tmp_path / "run", Normed(), one_large_loss, steps=40, scaler=dynamic())
    assert report.run.num_skipped == 1
    assert of_integrity(report) == set()


class CausalMask(nn.Module):
    """Fills its mask anew with every length, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(32, 32)
        self.out = nn.Linear(32, 8)
        self.register_buffer("mask", torch.zeros(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 5:
            self.mask = torch.full((6, 6), -torch.inf).triu(1)
        hidden = self.inside(x)
        scores = hidden @ hidden.transpose(1, 2) / 8 + self.mask[: x.shape[1], : x.shape[1]]
        out: torch.Tensor = self.out(torch.softmax(scores, -1) @ hidden).mean(1)
        return out


def test_a_mask_that_is_filled_with_inf_later_is_fine(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = numbers(step, 8, 5 if step > 10 else 6, 32)
        return F.cross_entropy(model(x).float(), x[:, 0, :8].argmax(1))

    torch.manual_seed(0)
    report = fit(tmp_path / "run", CausalMask(), loss, steps=30, scaler=dynamic())
    assert of_integrity(report) == set()


# Weights


def test_a_checkpoint_with_nan_is_told_from_a_step_that_broke(tmp_path: Path) -> None:
    model = mlp()
    model[2].weight.data[3, 4] = torch.nan
    report = fit(tmp_path / "run", model, steps=20, scaler=dynamic())
    assert of_integrity(report) == {"nonfinite-weight"}
    finding = the(report, "nonfinite-weight")
    assert [place.name for place in finding.where if place.type == "param"] == ["2.weight"]
    assert "before the first step" in finding.summary
    assert report.findings[0].id == "nonfinite-weight"
    assert "forward-overflow" not in alarming(report)


def test_nan_in_frozen_weights_is_found_in_the_forward(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model[0].weight.data[0, 0] = torch.nan
    report = fit(tmp_path / "run", model, steps=20, scaler=dynamic())
    assert of_integrity(report) == {"nonfinite-weight"}
    assert "0.weight" in places(the(report, "nonfinite-weight"))
    assert "forward-overflow" not in alarming(report)


def test_a_step_on_infinite_gradients_is_named(tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), times(one_large_loss, 1e4), steps=30, optimizer=None, every=5)
    finding = the(report, "nonfinite-weight")
    assert finding.steps[0] == 18
    assert "step 18: the optimizer stepped on non-finite gradients" in finding.summary


def test_weights_that_the_scaler_protected_are_fine(tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), one_large_loss, steps=30, scaler=dynamic())
    assert report.run.num_skipped == 1
    assert of_integrity(report) == set()


# Divergence


def regression(model: nn.Module, step: int) -> torch.Tensor:
    x = numbers(step, 32, 32)
    return F.mse_loss(model(x).float(), x.sum(1, keepdim=True))


def at_rate(path: Path, lr: float, loss: Loss = regression, *, scale: float = 16.0, **more: Any) -> AuditReport:
    torch.manual_seed(0)
    model = nn.Linear(32, 1)
    return fit(path, model, loss, optimizer=sgd(model, lr), scaler=dynamic(init_scale=scale), **{"steps": 50, **more})


def test_a_learning_rate_that_is_too_high_is_named_as_the_cause(tmp_path: Path) -> None:
    report = at_rate(tmp_path / "run", 1.5)
    finding = the(report, "divergence")
    assert_sound(report)
    assert report.findings[0].id == "divergence"
    assert evidence(finding)["lr"] == 1.5
    assert evidence(finding)["loss_growth_log2"] > 8
    assert finding.steps[0] < 10
    assert {other.consequence_of for other in report.findings[1:]} <= {"divergence"}


def test_growth_that_only_the_gradients_ended_is_divergence_too(tmp_path: Path) -> None:
    report = at_rate(tmp_path / "run", 0.9, scale=2.0**13, steps=20)
    assert all(loss is None or abs(loss) < float("inf") for loss in (report.run.loss_first, report.run.loss_last))
    assert report.run.num_skipped > 0
    assert "divergence" in alarming(report)


def suddenly(model: nn.Module, step: int) -> torch.Tensor:
    x = numbers(step, 32, 32) * (3e5 if step >= 25 else 1)
    return F.mse_loss(model(x).float(), x.sum(1, keepdim=True) * 0.01)


def spike(model: nn.Module, step: int) -> torch.Tensor:
    """Harder and harder batches, one that overflows, and back to where it was."""
    return regression(model, step) * (4.0 ** (step - 15) if 15 <= step < 22 else 1e12 if step == 22 else 1)


@pytest.mark.parametrize("loss", [suddenly, spike], ids=["from a flat loss", "and back"])
def test_an_overflow_that_no_growth_led_to_is_no_divergence(tmp_path: Path, loss: Loss) -> None:
    report = at_rate(tmp_path / "run", 1e-6, loss)
    assert report.run.num_skipped > 0
    assert "divergence" not in alarming(report)


def test_each_of_several_optimizers_is_judged_by_its_own_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    calm, wild = nn.Linear(32, 8), nn.Linear(32, 1)
    with gradaudit.attach(calm, out=tmp_path / "run", every=5) as audit:
        optimizers, scaler = [sgd(calm, 1e-3), sgd(wild, 1.5)], dynamic(init_scale=16.0)
        for step in range(50):
            for model, optimizer, loss in zip((calm, wild), optimizers, (classification, regression), strict=True):
                optimizer.zero_grad()
                with half():
                    value = loss(model, step)
                scaler.scale(value).backward()
                scaler.step(optimizer)
            scaler.update()
    finding = the(audit.report(), "divergence")
    assert evidence(finding)["lr"] == 1.5
