"""What flushes, what overflows, what never arrives, and where no scale fits."""

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
    half,
    informing,
    labels,
    mlp,
    numbers,
    picture_classification,
    places,
    recurrent,
    the,
)

Audited = Callable[[Script], AuditReport]


def times(loss: Callable[[nn.Module, int], torch.Tensor], factor: float) -> Callable[[nn.Module, int], torch.Tensor]:
    return lambda model, step: loss(model, step) * factor


# underflow


def loss_divided_by_the_size_of_the_data(path: Path) -> AuditReport:
    return fit(path, mlp(5), times(classification, 1 / 1800), scaler=dynamic(init_scale=1.0, growth_interval=60))


def attention_with_a_tiny_auxiliary_weight(path: Path) -> AuditReport:
    return fit(path, encoder(layers=2), times(copying, 1e-5), scaler=dynamic(init_scale=16.0, growth_interval=59))


def recurrent_net_with_a_tiny_loss(path: Path) -> AuditReport:
    return fit(path, recurrent(), times(first_token, 1e-6), scaler=dynamic(init_scale=256.0, growth_interval=59))


def pictures_with_a_tiny_loss(path: Path) -> AuditReport:
    return fit(
        path, convnet(), times(picture_classification, 1e-4), scaler=dynamic(init_scale=64.0, growth_interval=59)
    )


@pytest.mark.parametrize(
    "script",
    [
        loss_divided_by_the_size_of_the_data,
        attention_with_a_tiny_auxiliary_weight,
        recurrent_net_with_a_tiny_loss,
        pictures_with_a_tiny_loss,
    ],
)
def test_gradients_that_vanish_at_the_scale_in_force_are_underflow(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert set(alarming(report)) == {"gradient-underflow"}
    finding = the(report, "gradient-underflow")
    assert finding.scale_can_fix == "yes"
    assert finding.confidence == "high"
    assert finding.where
    numbers = evidence(finding)
    assert numbers["sqnr_db"] < 40
    assert numbers["num_tensors_below_target"] >= 1
    low = [row for row in report.layers if row.own_sqnr_db is not None and row.own_sqnr_db < 40]
    assert len(low) >= 1
    assert report.recommendation is not None
    assert report.recommendation.init_scale > numbers["scale"]
    # what a histogram recorded at too small a scale tells of a larger one is a lower bound
    assert report.recommendation.predicted.min_sqnr_db > 35 > report.recommendation.current.min_sqnr_db + 10


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))
        self.small = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.trunk(x))
        return self.large(hidden), self.small(hidden)


def one_head_of_two_has_a_tiny_weight(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        large, small = model(x)
        return F.cross_entropy(large, y) + 3e-8 * F.cross_entropy(small, (y + 1) % NUM_CLASSES)

    return fit(path, TwoHeads(), loss, scaler=dynamic(init_scale=2.0**12))


def test_only_the_branch_that_vanishes_is_named(audited: Audited) -> None:
    report = audited(one_head_of_two_has_a_tiny_weight)

    assert_sound(report)
    assert "gradient-underflow" in alarming(report)
    assert {name.split(".")[0].split(" ")[0] for name in places(the(report, "gradient-underflow"))} <= {"small"}
    healthy = [row for row in report.layers if row.fqn.startswith(("trunk", "large")) and row.own_sqnr_db is not None]
    assert all(row.own_sqnr_db > 40 for row in healthy)


def everything_below_the_head_is_lost(path: Path) -> AuditReport:
    return fit(path, mlp(3), times(classification, 3e-8), scaler=dynamic(init_scale=1.0, growth_interval=59))


def test_layers_that_are_flushed_entirely_are_an_error(audited: Audited) -> None:
    report = audited(everything_below_the_head_is_lost)

    assert_sound(report)
    assert alarming(report)["gradient-underflow"] == "error"
    assert "layer-without-gradient" not in alarming(report), "they have one, FP16 cannot hold it"
    assert the(report, "gradient-underflow").scale_can_fix == "yes"


def mostly_dead_relus(path: Path) -> AuditReport:
    model = mlp(2)
    nn.init.constant_(model[0].bias, -0.5)
    nn.init.constant_(model[2].bias, -0.1)
    return fit(path, model, scaler=dynamic())


def heavy_dropout(path: Path) -> AuditReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.9), nn.Linear(WIDTH, NUM_CLASSES))
    return fit(path, model, scaler=dynamic())


def padded_tokens(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens = labels(step, 8, 10, num_classes=20)
        padding = torch.arange(10)[None, :] >= 2 + labels(step + 1, 8, 1, num_classes=4)
        logits = model(tokens, padding)
        return F.cross_entropy(logits.flatten(0, 1), tokens.masked_fill(padding, -100).flatten())

    return fit(path, encoder(), loss, scaler=dynamic())


def unused_embedding_rows(path: Path) -> AuditReport:
    return fit(path, encoder(vocabulary=2000), copying, scaler=dynamic(), steps=40)


def frozen_layers(path: Path) -> AuditReport:
    model = mlp(3)
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    return fit(path, model, scaler=dynamic())


def bias_before_a_norm(path: Path) -> AuditReport:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH),
        nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES),
    )  # fmt: skip
    return fit(path, model, scaler=dynamic())


@pytest.mark.parametrize(
    "script",
    [mostly_dead_relus, heavy_dropout, padded_tokens, unused_embedding_rows, frozen_layers, bias_before_a_norm],
)
def test_zeros_that_are_zero_at_every_scale_are_no_underflow(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_healthy(report)
    assert informing(report) <= {"scale-calibration", "gradient-headroom-low"}


@pytest.mark.parametrize("script", [mostly_dead_relus, heavy_dropout, padded_tokens, unused_embedding_rows])
def test_those_look_alikes_do_have_zeros(script: Script, audited: Audited) -> None:
    assert max(row.zones["zero"] for row in audited(script).layers) > 0.6


# overflow


def residual_net_held_at_2_to_the_20(path: Path) -> AuditReport:
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.outer(torch.relu(self.inner(x)))

    model = nn.Sequential(*[Residual() for _ in range(3)], nn.Linear(WIDTH, NUM_CLASSES))
    scaler = dynamic(init_scale=2.0**20)
    return fit(path, model, scaler=scaler, update=lambda: scaler.update(2.0**20))


def scale_raised_every_ten_steps(path: Path) -> AuditReport:
    scaler = dynamic()

    def after(step: int) -> None:
        if step % 10 == 9:
            scaler.update(2.0**25)

    return fit(path, encoder(), copying, scaler=scaler, steps=80, every=5, after=after)


@pytest.mark.parametrize("script", [residual_net_held_at_2_to_the_20, scale_raised_every_ten_steps])
def test_a_backward_that_overflows_names_the_first_tensor_and_the_largest_safe_scale(
    script: Script, audited: Audited
) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("gradient-overflow") == "warning"
    assert set(alarming(report)) <= {"gradient-overflow", "static-scale-unsafe", "scale-thrashing"}
    finding = the(report, "gradient-overflow")
    assert finding.scale_can_fix == "yes"
    assert finding.confidence == "high"
    (scale,) = [item for item in finding.evidence if item.name == "scale"]
    assert scale.threshold is not None
    assert 2.0**10 <= scale.threshold < scale.value
    assert places(finding) & {"3", "3.weight", "3.bias", "head", "head.weight", "head.bias"}, "next to the loss"
    assert report.recommendation is not None
    assert report.recommendation.init_scale <= scale.threshold


def large_loss_and_no_scaler(path: Path) -> AuditReport:
    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=1e-9)
    return fit(path, model, times(classification, 1e7), optimizer=optimizer, every=1, steps=20)


def test_without_a_scaler_an_overflow_reaches_the_weights_and_is_told(audited: Audited) -> None:
    report = audited(large_loss_and_no_scaler)

    assert_sound(report)
    assert alarming(report) == {"gradient-overflow": "warning", "missing-loss-scaling": "warning"}
    assert "stepped on inf" in the(report, "gradient-overflow").remedy


# headroom


def gradients_grow_under_a_held_scale(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (1 + step / 5)

    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.0)
    scaler = dynamic(init_scale=2.0**14, growth_interval=10**9)
    return fit(path, model, loss, scaler=scaler, optimizer=optimizer, steps=60, every=3)


def test_a_gradient_near_the_limit_that_grows_is_worth_knowing(audited: Audited) -> None:
    report = audited(gradients_grow_under_a_held_scale)

    assert_healthy(report)
    assert informing(report) == {"gradient-headroom-low"}
    numbers = evidence(the(report, "gradient-headroom-low"))
    assert 0 < numbers["headroom"] <= 2
    assert 1 < numbers["growth"] < 5


def grows_out_of_a_narrow_window(path: Path) -> AuditReport:
    """The small head needs the scale that the large one, growing, will soon not bear."""
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        large, small = model(x)
        grown = 2.0 ** (step / 10)
        return grown * F.cross_entropy(large, y) + 3e-7 * F.cross_entropy(small, (y + 1) % NUM_CLASSES)

    optimizer = torch.optim.SGD((model := TwoHeads()).parameters(), lr=0.0)
    scaler = dynamic(init_scale=2.0**13, growth_interval=10**9)
    return fit(path, model, loss, scaler=scaler, optimizer=optimizer, steps=50, every=2)


def test_it_is_a_warning_where_the_window_is_about_to_close(audited: Audited) -> None:
    report = audited(grows_out_of_a_narrow_window)

    assert_sound(report)
    assert alarming(report)["gradient-headroom-low"] == "warning"
    assert places(the(report, "gradient-headroom-low")) <= {"large.2.weight", "large.2.bias", "large.2", "trunk.weight"}


def only_the_scale_grows(path: Path) -> AuditReport:
    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.0)
    scaler = dynamic(init_scale=2.0**8, growth_interval=6)
    return fit(path, model, scaler=scaler, optimizer=optimizer, steps=120, every=3)


def test_a_growing_scale_is_no_headroom_trend(audited: Audited) -> None:
    report = audited(only_the_scale_grows)

    assert report.run.scale_last is not None
    assert report.run.scale_last >= 2.0**16
    assert_healthy(report)
    assert informing(report) == {"scale-hunting"}


# empty window


def ten_decades_between_two_losses(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        large, small = model(x)
        return 3e3 * large.float().square().sum() + 1e-7 * F.cross_entropy(small, y)

    optimizer = torch.optim.SGD((model := TwoHeads()).parameters(), lr=1e-12)
    return fit(path, model, loss, scaler=dynamic(), optimizer=optimizer)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.segment = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
        self.classify = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.segment(x), self.classify(x)


def summed_pixels_beside_an_averaged_class(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = numbers(step, 16, 3, 8, 8)
        pixels, logits = model(x)
        reconstruction = (pixels.float() - 300 * x.mean(1, keepdim=True)).square().sum()
        return reconstruction + 1e-8 * F.cross_entropy(logits, x.mean((2, 3)).argmax(1))

    optimizer = torch.optim.SGD((model := Pictures()).parameters(), lr=1e-12)
    return fit(path, model, loss, scaler=dynamic(init_scale=4.0), optimizer=optimizer)


@pytest.mark.parametrize(
    ("script", "small", "large"),
    [
        (ten_decades_between_two_losses, "small", "large"),
        (summed_pixels_beside_an_averaged_class, "classify", "segment"),
    ],
)
def test_two_losses_that_no_single_scale_fits_are_an_error_and_both_are_named(
    script: Script, small: str, large: str, audited: Audited
) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("scale-window-empty") == "error"
    assert set(alarming(report)) <= {"scale-window-empty", "gradient-underflow"}
    finding = the(report, "scale-window-empty")
    assert finding.scale_can_fix == "no"
    assert [place.name.split(".")[0].split(" ")[0] for place in finding.where] == [small, large]
    numbers = evidence(finding)
    assert numbers["window_low_log2"] > numbers["window_high_log2"]
    assert numbers["empty_frac"] > 0.5
    assert report.recommendation is not None
    assert report.recommendation.precision != "fp16"
    assert report.recommendation.change_needed


def test_two_losses_of_like_size_share_a_wide_window(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        large, small = model(x)
        return F.cross_entropy(large, y) + 0.01 * F.cross_entropy(small, (y + 1) % NUM_CLASSES)

    report = fit(tmp_path / "run", TwoHeads(), loss, scaler=dynamic())

    assert_healthy(report)
    assert report.recommendation is not None
    assert report.recommendation.window.high_log2 - report.recommendation.window.low_log2 >= 10


# layers without gradient


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(1, out=WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x).detach())
        return logits


def body_is_detached(path: Path) -> AuditReport:
    torch.manual_seed(0)
    return fit(path, Detached(), scaler=dynamic())


class Spare(nn.Module):
    def __init__(self, *, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.body = mlp(1)
        self.spare = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(x)
        return logits + 0.0 * self.spare(x) if self.zero else logits


def branch_is_never_used(path: Path) -> AuditReport:
    torch.manual_seed(0)
    return fit(path, Spare(zero=False), scaler=dynamic())


def branch_is_multiplied_by_zero(path: Path) -> AuditReport:
    torch.manual_seed(0)
    return fit(path, Spare(zero=True), scaler=dynamic())


def encoder_runs_without_gradients(path: Path) -> AuditReport:
    model = encoder()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens = labels(step, 8, 6, num_classes=20)
        with torch.no_grad():
            hidden = model.encoder(model.embed(tokens))
        return F.cross_entropy(model.head(hidden).flatten(0, 1), tokens.flatten())

    return fit(path, model, loss, scaler=dynamic())


@pytest.mark.parametrize(
    ("script", "dead", "alive"),
    [
        (body_is_detached, "body", "head"),
        (branch_is_never_used, "spare", "body"),
        (branch_is_multiplied_by_zero, "spare", "body"),
        (encoder_runs_without_gradients, "encoder", "head"),
    ],
)
def test_layers_the_loss_does_not_reach_are_named(script: Script, dead: str, alive: str, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report) == {"layer-without-gradient": "warning"}
    finding = the(report, "layer-without-gradient")
    assert finding.scale_can_fix == "no"
    assert any(name.startswith(dead) for name in places(finding))
    assert not any(name.startswith(alive) for name in places(finding))
    assert evidence(finding)["num_parameters"] >= 2
    assert report.recommendation is not None
    assert not report.recommendation.change_needed


def borrowed_weight(path: Path) -> AuditReport:
    """The module is never called: its weight goes through a functional call, its bias nowhere."""
    torch.manual_seed(0)

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.outer = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.outer(torch.relu(F.linear(x, self.inner.weight)))
            return logits

    return fit(path, Borrowing(), scaler=dynamic())


def functional_call(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        params = {name: 1.0 * param for name, param in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    return fit(path, mlp(), loss, scaler=dynamic())


def adapter_that_starts_at_zero(path: Path) -> AuditReport:
    """Its first matrix has no gradient until its second has moved."""
    torch.manual_seed(0)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, NUM_CLASSES)
            nn.init.zeros_(self.up.weight)
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(torch.relu(self.base(x) + self.up(self.down(x))))
            return logits

    return fit(path, Adapted(), scaler=dynamic())


def layers_unfrozen_on_the_way(path: Path) -> AuditReport:
    model = mlp(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model[0].requires_grad_(False)

    def after(step: int) -> None:
        if step == 30:
            model[0].requires_grad_(True)

    return fit(path, model, scaler=dynamic(), optimizer=optimizer, after=after)


@pytest.mark.parametrize(
    "script",
    [
        frozen_layers, bias_before_a_norm, borrowed_weight, functional_call, adapter_that_starts_at_zero,
        layers_unfrozen_on_the_way,
    ],
)  # fmt: skip
def test_layers_without_a_gradient_for_a_reason_are_not_named(script: Script, audited: Audited) -> None:
    assert_healthy(audited(script))


# no loss scaling


def no_scaler_at_all(path: Path) -> AuditReport:
    return fit(path, encoder(), copying)


def scaler_switched_off(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=torch.amp.GradScaler("cpu", enabled=False))


def no_scaler_and_a_tiny_loss(path: Path) -> AuditReport:
    return fit(path, mlp(4), times(classification, 1e-4))


@pytest.mark.parametrize(
    ("script", "more"),
    [
        (no_scaler_at_all, set()),
        (scaler_switched_off, set()),
        (no_scaler_and_a_tiny_loss, {"gradient-underflow"}),
    ],
)
def test_fp16_without_loss_scaling_is_told(script: Script, more: set[str], audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report)["missing-loss-scaling"] == "warning"
    assert set(alarming(report)) == {"missing-loss-scaling", *more}
    finding = the(report, "missing-loss-scaling")
    assert finding.scale_can_fix == "yes"
    assert evidence(finding)["num_steps"] == 60
    assert {place.type for place in finding.where} == {"call_site"}
    assert {place.file is not None and place.file.endswith("training.py") for place in finding.where} == {True}
    assert ("disabled" in finding.summary) is (script is scaler_switched_off)
    assert report.recommendation is not None
    assert report.recommendation.change_needed
    assert report.recommendation.current_settings is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_without_fp16_no_scaling_is_needed(dtype: torch.dtype | None, tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), dtype=dtype)

    assert_healthy(report)
    assert report.findings == ()
    assert report.recommendation is None


def test_evaluating_in_fp16_needs_no_scaling(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.no_grad(), half():
            model(numbers(step, 8, WIDTH))
        return classification(model, step)

    report = fit(tmp_path / "run", mlp(), loss, dtype=None)

    assert_healthy(report)
