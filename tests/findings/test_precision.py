"""Precision set-up: weights, optimizer state, norms, scalers and autocast that do not fit, each beside its twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradaudit
from gradaudit.analysis.report import AuditReport, Finding
from tests.findings.conftest import Script
from tests.findings.training import (
    alarming,
    assert_sound,
    classes,
    classification,
    dynamic,
    evidence,
    fit,
    half,
    informing,
    mlp,
    numbers,
    places,
    the,
)

Audited = Callable[[Script], AuditReport]


def ids(report: AuditReport) -> set[str]:
    return {finding.id for finding in report.findings}


def plainly(
    path: Path,
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int], torch.Tensor],
    *,
    steps: int = 24,
    between: Callable[[nn.Module], object] = lambda model: None,
) -> AuditReport:
    """A loop without scaler and autocast; `between` runs between backward and step."""
    with gradaudit.attach(model, out=path, every=3) as audit:
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, step).backward()
            between(model)
            optimizer.step()
    return audit.report()


def half_loss(model: nn.Module, step: int) -> torch.Tensor:
    x, y = classes(step)
    return F.cross_entropy(model(x.half()).float(), y)


class OneHalfLayer(nn.Module):
    """An FP32 network in which a single activation is half."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.act = nn.PReLU(32).half()
        self.last = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.act(self.first(x).half()))
        return out


def half_model_with_scaler(path: Path) -> AuditReport:
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        fit(path, mlp().half(), scaler=dynamic(), steps=3)
    return gradaudit.audit(gradaudit.open_run(path))


def one_half_layer(path: Path) -> AuditReport:
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        fit(path, OneHalfLayer(), scaler=dynamic(), steps=3)
    return gradaudit.audit(gradaudit.open_run(path))


def half_without_scaler(path: Path) -> AuditReport:
    return plainly(path, mlp().half(), lambda params: torch.optim.SGD(params, lr=1e-2), half_loss)


def frozen_half_backbone(path: Path) -> AuditReport:
    model = nn.Sequential(mlp(out=32).half().requires_grad_(False), nn.Linear(32, 8))

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x.half()).float(), y)

    return fit(path, model, loss, scaler=dynamic(), steps=20)


class WithMasters(torch.optim.Optimizer):
    """SGD on FP32 copies of half weights, kept in its state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["weight"] = param.detach().float()
                state["weight"] -= group["lr"] * param.grad.float()
                param.copy_(state["weight"])


def half_with_masters(path: Path) -> AuditReport:
    return plainly(path, mlp().half(), WithMasters, half_loss)


@pytest.mark.parametrize("script", [half_model_with_scaler, half_without_scaler])
def test_half_weights_that_are_trained_are_named(audited: Audited, script: Script) -> None:
    report = audited(script)
    assert_sound(report)
    finding = the(report, "half-trainable-params")
    assert (finding.severity, finding.scale_can_fix) == ("error", "no")
    assert {"0.weight", "0.bias", "4.weight"} <= places(finding)
    assert evidence(finding)["num_half_params"] == 6


def test_what_torch_refuses_is_explained_with_the_one_name_and_the_line(audited: Audited) -> None:
    report = audited(one_half_layer)
    finding = the(report, "half-trainable-params")
    assert [place.name for place in finding.where if place.type == "param"] == ["act.weight"]
    assert "act.weight" in finding.remedy
    (call,) = [place for place in finding.where if place.type == "call_site"]
    assert call.file is not None
    assert call.file.endswith("training.py")
    assert "Attempting to unscale FP16 gradients" in finding.summary
    assert report.verdict.level == "failing"
    assert report.findings[0].id == "half-trainable-params"


@pytest.mark.parametrize("script", [frozen_half_backbone, half_with_masters])
def test_half_weights_that_are_frozen_or_have_masters_are_fine(audited: Audited, script: Script) -> None:
    assert not {"half-trainable-params", "swallowed-updates", "optimizer-eps-flushed"} & ids(audited(script))


def near_one(dtype: torch.dtype) -> nn.Sequential:
    """Weights of about one, whose neighbours are 2^-10 away in FP16."""
    model = mlp(1)
    for param in model.parameters():
        param.data.mul_(0.1).add_(1.0)
    return model.to(dtype)


def small_loss(dtype: torch.dtype) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return (model(numbers(step, 16, 32).to(dtype) * 0.05).float()).square().mean()

    return loss


class Kahan(torch.optim.Optimizer):
    """SGD that carries what was rounded away over to the next step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                lost = self.state[param].setdefault("kahan_compensation", torch.zeros_like(param))
                lost -= group["lr"] * param.grad
                before = param.clone()
                param += lost
                lost += before - param


def swallowed(dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer]) -> Script:
    def script(path: Path) -> AuditReport:
        return plainly(path, near_one(dtype), make, small_loss(dtype))

    return script


def sgd(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=lr)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_updates_that_round_away_are_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    report = swallowed(dtype, sgd(1e-5))(tmp_path / "run")
    assert_sound(report)
    finding = the(report, "swallowed-updates")
    assert finding.severity == "error"
    assert evidence(finding)["swallowed_share"] > 0.9
    assert evidence(finding)["lr"] == 1e-5
    assert "0.weight" in places(finding)
    assert ("half-trainable-params" in ids(report)) == (dtype is torch.float16)


@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        (torch.float32, sgd(1e-5)),
        (torch.bfloat16, lambda params: torch.optim.Adam(params, lr=0.5)),
        (torch.bfloat16, lambda params: Kahan(params, 1e-5)),
    ],
    ids=["in FP32", "large enough", "carried over"],
)
def test_updates_that_arrive_are_fine(
    tmp_path: Path, dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    assert "swallowed-updates" not in ids(swallowed(dtype, make)(tmp_path / "run"))


def adam(dtype: torch.dtype, eps: float) -> Script:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x.to(dtype)).float(), y)

    def script(path: Path) -> AuditReport:
        return plainly(path, mlp().to(dtype), lambda params: torch.optim.Adam(params, lr=1e-3, eps=eps), loss)

    return script


def test_an_eps_that_is_zero_in_half_breaks_the_weights(tmp_path: Path) -> None:
    report = adam(torch.float16, 1e-8)(tmp_path / "run")
    assert_sound(report)
    assert (the(report, "optimizer-eps-flushed").severity, places(the(report, "optimizer-eps-flushed"))) == (
        "error",
        {"Adam"},
    )
    weights = the(report, "nonfinite-weight")
    assert "eps that is 0 in FP16" in weights.summary
    assert weights.consequence_of is not None


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float16, 1e-4), (torch.float32, 1e-8), (torch.bfloat16, 1e-8)])
def test_an_eps_that_is_there_in_the_states_dtype_is_fine(tmp_path: Path, dtype: torch.dtype, eps: float) -> None:
    assert "optimizer-eps-flushed" not in ids(adam(dtype, eps)(tmp_path / "run"))


def large_half_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Each gradient fits into FP16, and their norm does not."""
    return (model(numbers(step, 32, 32).half() * 2).float() * 1000).sum()


def clip_in_half(model: nn.Module) -> None:
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(1.0 / norm)


def clip_by_torch(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def make_one_infinite(model: nn.Module) -> None:
    grad = next(model.parameters()).grad
    assert grad is not None
    grad[0, 0] = torch.inf
    clip_by_torch(model)


def norm_of(clip: Callable[[nn.Module], object]) -> Script:
    def script(path: Path) -> AuditReport:
        return plainly(path, mlp().half(), sgd(1e-3), large_half_loss, between=clip, steps=8)

    return script


def test_an_infinite_norm_of_finite_gradients_is_named_with_its_line(tmp_path: Path) -> None:
    report = norm_of(clip_by_torch)(tmp_path / "run")
    assert_sound(report)
    finding = the(report, "gradient-norm-overflow")
    assert (finding.severity, finding.confidence) == ("error", "high")
    (call,) = [place for place in finding.where if place.type == "call_site"]
    assert call.line is not None
    assert Path(__file__).read_text().splitlines()[call.line - 1].strip().startswith("nn.utils.clip_grad_norm_")
    assert evidence(finding)["num_steps"] == 8


def test_a_norm_taken_by_hand_in_half_is_seen_by_what_it_leaves(tmp_path: Path) -> None:
    finding = the(norm_of(clip_in_half)(tmp_path / "run"), "gradient-norm-overflow")
    assert finding.confidence == "medium"
    assert evidence(finding)["norm"] > 65504


def test_a_gradient_that_is_infinite_itself_is_another_matter(tmp_path: Path) -> None:
    assert "gradient-norm-overflow" not in ids(norm_of(make_one_infinite)(tmp_path / "run"))


def test_gradients_dropped_on_purpose_are_no_infinite_norm(tmp_path: Path) -> None:
    def drop_some(model: nn.Module) -> None:
        norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
        if sum(norms) > drop_some.limit:  # type: ignore[attr-defined]
            for param in model.parameters():
                assert param.grad is not None
                param.grad.zero_()
        drop_some.limit = sum(norms)  # type: ignore[attr-defined]

    drop_some.limit = 1e9  # type: ignore[attr-defined]

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * 1e4

    report = plainly(tmp_path / "run", mlp(), sgd(1e-7), loss, between=drop_some)
    assert "gradient-norm-overflow" not in ids(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_scaler_beside_no_fp16_at_all_is_too_much(tmp_path: Path, dtype: torch.dtype | None) -> None:
    report = fit(tmp_path / "run", mlp(), scaler=dynamic(), dtype=dtype, steps=20)
    assert_sound(report)
    finding = the(report, "scaler-without-fp16")
    assert finding.severity == "warning"
    assert ("bfloat16" if dtype else "float32") in finding.title
    assert any(place.name == "GradScaler" for place in finding.where)


def fp16_in_one_part(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        with half():
            hidden = model[0](x)  # type: ignore[index]
        return F.cross_entropy(model[1](hidden.float()), y)  # type: ignore[index]

    return fit(path, nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)), loss, scaler=dynamic(), dtype=torch.bfloat16)


def bf16_with_a_disabled_scaler(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(enabled=False), dtype=torch.bfloat16, steps=20)


@pytest.mark.parametrize("script", [fp16_in_one_part, bf16_with_a_disabled_scaler])
def test_a_scaler_for_some_fp16_or_one_that_is_off_is_fine(audited: Audited, script: Script) -> None:
    assert not {"scaler-without-fp16", "autocast-inactive"} & ids(audited(script))


def trained_with(region: Callable[[], Any], make: Callable[[], torch.amp.GradScaler | None] = lambda: None) -> Script:
    def script(path: Path) -> AuditReport:
        model = mlp()
        with gradaudit.attach(model, out=path, every=5) as audit:
            optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-2), make()
            for step in range(12):
                optimizer.zero_grad()
                with region():
                    loss = classification(model, step)
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
        return audit.report()

    return script


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    "script",
    [
        trained_with(lambda: torch.autocast("cuda", dtype=torch.float16)),
        trained_with(lambda: torch.autocast("cuda", dtype=torch.float16), dynamic),
        trained_with(lambda: torch.cuda.amp.autocast(), lambda: torch.cuda.amp.GradScaler()),
        trained_with(half, torch.amp.GradScaler),
    ],
    ids=["autocast alone", "beside a scaler", "both, by their old names", "the scaler alone"],
)
def test_mixed_precision_for_another_device_is_off(tmp_path: Path, script: Script) -> None:
    report = script(tmp_path / "run")
    assert_sound(report)
    finding = the(report, "autocast-inactive")
    assert finding.severity == "warning"
    assert all(place.file is not None and place.file.endswith("test_precision.py") for place in finding.where)
    assert "scaler-without-fp16" not in ids(report)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "script",
    [
        trained_with(
            lambda: torch.autocast("cuda", enabled=False), lambda: torch.amp.GradScaler("cuda", enabled=False)
        ),
        trained_with(lambda: torch.autocast("cpu", dtype=torch.float16), dynamic),
        trained_with(lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.amp.GradScaler),
    ],
    ids=["off on purpose", "on", "bfloat16 needs no scaler"],
)
def test_what_is_off_on_purpose_or_on_is_fine(tmp_path: Path, script: Script) -> None:
    assert "autocast-inactive" not in ids(script(tmp_path / "run"))


def test_compiled_modules_are_a_blind_spot_and_no_alarm(tmp_path: Path) -> None:
    model = nn.Sequential(torch.compile(mlp(1, out=32), backend="eager"), nn.Linear(32, 8))
    report = fit(tmp_path / "run", model, scaler=dynamic(), steps=12)
    assert_sound(report)
    assert "compiled-blind-spot" in informing(report)
    assert places(the(report, "compiled-blind-spot")) == {"0"}
    assert "scaler-without-fp16" not in alarming(report)


def test_eager_modules_are_no_blind_spot(tmp_path: Path) -> None:
    assert ids(fit(tmp_path / "run", mlp(), scaler=dynamic(), steps=12)) == set()


def test_each_finding_says_what_to_do(audited: Audited) -> None:
    findings: list[Finding] = [
        f for script in (half_model_with_scaler, one_half_layer) for f in audited(script).findings
    ]
    assert all(finding.remedy and finding.where for finding in findings)
