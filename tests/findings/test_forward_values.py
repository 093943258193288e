"""Each finding about forward values by a real FP16 training, beside the nearest one that is sound."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from gradaudit.analysis.report import AuditReport
from tests.findings.training import WIDTH, alarming, classes, dynamic, evidence, fit, informing, mlp, the

FORWARD_IDS = {
    "forward-overflow", "attention-logits-overflow", "masked-row", "reduction-overflow", "loss-in-half",
    "epsilon-flushed", "nonfinite-backward", "forward-headroom-low", "unlocated-nonfinite", "critical-op-in-half",
}  # fmt: skip

STEPS = 14


class Around(nn.Module):
    """A layer, something written by hand, and a head."""

    def __init__(self, code: Callable[[torch.Tensor], torch.Tensor], size: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        with torch.no_grad():
            self.layer.weight.mul_(size)
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.code(self.layer(x)))
        return out


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    x, y = classes(step)
    return F.cross_entropy(model(x).float(), y)


def run(path: Path, code: Callable[[torch.Tensor], torch.Tensor], size: float = 1.0) -> AuditReport:
    model = Around(code, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return fit(path, model, plain_loss, steps=STEPS, scaler=dynamic(init_scale=2.0**10), optimizer=optimizer)


def forward_findings(report: AuditReport) -> set[str]:
    return set(alarming(report)) & FORWARD_IDS


def marked(code: Callable[..., object], mark: str = "# here") -> int:
    """The line of a function that carries a mark."""
    source, first = inspect.getsourcelines(code)
    return first + next(i for i, line in enumerate(source) if mark in line)


def first_line(report: AuditReport, name: str) -> int | None:
    return next(place.line for place in the(report, name).where if place.type == "call_site")


def product(h: torch.Tensor) -> torch.Tensor:
    return h * h.roll(1, -1)  # here


def test_forward_overflow(tmp_path: Path) -> None:
    report = run(tmp_path, product, size=300.0)
    assert forward_findings(report) == {"forward-overflow"}
    assert report.findings[0].id == "forward-overflow"
    assert first_line(report, "forward-overflow") == marked(product)
    assert evidence(the(report, "forward-overflow"))["amax_fp32"] > 65520
    assert the(report, "forward-overflow").scale_can_fix == "no"


def test_a_product_in_range(tmp_path: Path) -> None:
    assert forward_findings(run(tmp_path, product)) == set()


def test_forward_headroom_low(tmp_path: Path) -> None:
    report = run(tmp_path, lambda h: torch.tanh(h) * 40_000.0 / 40_000.0)
    assert forward_findings(report) == {"forward-headroom-low"}
    assert the(report, "forward-headroom-low").severity == "warning"


def test_large_values_with_room(tmp_path: Path) -> None:
    assert forward_findings(run(tmp_path, lambda h: torch.tanh(h) * 20_000.0 / 20_000.0)) == set()


def scores_first(h: torch.Tensor) -> torch.Tensor:
    q = h.view(-1, 4, WIDTH // 4)
    scores = q @ q.transpose(1, 2)  # here
    return (torch.softmax(scores / 64.0, -1) @ q).flatten(1)


def scaled_first(h: torch.Tensor) -> torch.Tensor:
    q = h.view(-1, 4, WIDTH // 4)
    return (torch.softmax(((q / 256.0) @ (q / 256.0).transpose(1, 2)).float(), -1).to(q.dtype) @ q).flatten(1)


def test_attention_logits_overflow(tmp_path: Path) -> None:
    report = run(tmp_path, scores_first, size=300.0)
    assert forward_findings(report) - {"critical-op-in-half"} == {"attention-logits-overflow"}
    assert first_line(report, "attention-logits-overflow") == marked(scores_first)


def test_queries_scaled_before_the_product(tmp_path: Path) -> None:
    assert forward_findings(run(tmp_path, scaled_first, size=300.0)) == set()


def masked(h: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    q = h.view(-1, 4, WIDTH // 4)
    scores = q @ q.transpose(1, 2)
    scores = scores.masked_fill(~allowed, float("-inf"))  # here
    return (torch.softmax(scores, -1) @ q).flatten(1)


def test_masked_row(tmp_path: Path) -> None:
    allowed = torch.tril(torch.ones(4, 4, dtype=torch.bool))
    allowed[0] = False
    report = run(tmp_path, lambda h: masked(h, allowed))
    assert forward_findings(report) == {"masked-row"}
    assert first_line(report, "masked-row") == marked(masked)
    assert evidence(the(report, "masked-row"))["num_masked_rows"] == 32


def test_a_mask_that_leaves_one_entry(tmp_path: Path) -> None:
    report = run(tmp_path, lambda h: masked(h, torch.tril(torch.ones(4, 4, dtype=torch.bool))))
    assert forward_findings(report) == set()
    assert "critical-op-in-half" in informing(report)


def test_a_mask_constant_out_of_range_that_leaves_one_entry(tmp_path: Path) -> None:
    def code(h: torch.Tensor) -> torch.Tensor:
        q = h.view(-1, 4, WIDTH // 4)
        scores = q @ q.transpose(1, 2) + torch.triu(torch.full((4, 4), -1e9), 1).to(h.dtype)
        return (torch.softmax(scores, -1) @ q).flatten(1)

    assert forward_findings(run(tmp_path, code)) == set()


def rms_norm(h: torch.Tensor) -> torch.Tensor:
    size = h.pow(2).mean(-1, keepdim=True)  # here
    return h * torch.rsqrt(size + 1e-3)


def test_reduction_overflow_that_becomes_a_silent_zero(tmp_path: Path) -> None:
    report = run(tmp_path, rms_norm, size=3000.0)
    assert forward_findings(report) == {"reduction-overflow"}
    assert first_line(report, "reduction-overflow") == marked(rms_norm)
    assert "turns the inf into a plain 0" in the(report, "reduction-overflow").summary


def test_squares_in_fp32(tmp_path: Path) -> None:
    report = run(tmp_path, lambda h: rms_norm(h.float()).to(h.dtype), size=3000.0)
    assert forward_findings(report) == set()


def one_element(model: nn.Module, step: int) -> torch.Tensor:
    x, y = classes(step)
    return F.cross_entropy(model(x), y).half().reshape(1)


def test_a_scaled_loss_of_one_element(tmp_path: Path) -> None:
    report = fit(tmp_path, mlp(), one_element, steps=STEPS, scaler=dynamic(growth_interval=5))
    finding = the(report, "loss-in-half")
    assert evidence(finding)["scaled_loss"] > 65520
    assert finding.scale_can_fix == "no"


def test_a_loss_without_dimension_becomes_fp32(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return one_element(model, step)[0]

    assert forward_findings(fit(tmp_path, mlp(), loss, steps=STEPS, scaler=dynamic())) == set()


def outside(model: nn.Module, step: int, *, widen: bool) -> torch.Tensor:
    x, _ = classes(step)
    out = model(x)
    with torch.autocast("cpu", enabled=False):
        out = out.float() if widen else out
        return F.mse_loss(out, torch.zeros_like(out))  # here


def test_a_criterion_outside_autocast(tmp_path: Path) -> None:
    report = fit(tmp_path, mlp(), lambda m, s: outside(m, s, widen=False), steps=STEPS, scaler=dynamic())
    assert "loss-in-half" in forward_findings(report)
    assert first_line(report, "loss-in-half") == marked(outside)


def test_a_criterion_outside_autocast_in_fp32(tmp_path: Path) -> None:
    report = fit(tmp_path, mlp(), lambda m, s: outside(m, s, widen=True), steps=STEPS, scaler=dynamic())
    assert forward_findings(report) == set()


def standardised(h: torch.Tensor, eps: float) -> torch.Tensor:
    flat = h * torch.tensor([0.0] + [1.0] * (WIDTH - 1), dtype=h.dtype)
    return flat / (flat.abs().mean(0) + eps)  # here


def test_epsilon_flushed_and_divided_by(tmp_path: Path) -> None:
    report = run(tmp_path, lambda h: standardised(h, 1e-8))
    assert forward_findings(report) == {"epsilon-flushed"}
    assert the(report, "epsilon-flushed").severity == "error"
    assert first_line(report, "epsilon-flushed") == marked(standardised)


def test_an_epsilon_that_fp16_has(tmp_path: Path) -> None:
    assert forward_findings(run(tmp_path, lambda h: standardised(h, 1e-3))) == set()


def test_an_epsilon_flushed_without_harm(tmp_path: Path) -> None:
    report = run(tmp_path, lambda h: h / (h.abs().sum(-1, keepdim=True) + 1e-8))
    assert forward_findings(report) == {"epsilon-flushed"}
    assert the(report, "epsilon-flushed").severity == "warning"


def test_an_epsilon_whose_absence_shows_in_the_backward(tmp_path: Path) -> None:
    report = run(tmp_path, lambda h: torch.sqrt((h * 0.0).square() + 1e-12))
    assert forward_findings(report) == {"epsilon-flushed"}
    assert the(report, "epsilon-flushed").severity == "error"


def root(h: torch.Tensor, low: float) -> torch.Tensor:
    distance = (h.float() * 0.0).clamp_min(low)
    return torch.sqrt(distance).to(h.dtype)  # here


def test_nonfinite_backward(tmp_path: Path) -> None:
    report = run(tmp_path, lambda h: root(h, 0.0))
    assert forward_findings(report) == {"nonfinite-backward"}
    assert first_line(report, "nonfinite-backward") == marked(root)
    assert "square root" in the(report, "nonfinite-backward").summary


def test_a_root_away_from_zero(tmp_path: Path) -> None:
    assert forward_findings(run(tmp_path, lambda h: root(h, 1e-3))) == set()


def softmax_outside(h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.softmax(h.half(), -1)  # here


def test_a_critical_operation_in_half(tmp_path: Path) -> None:
    report = run(tmp_path, softmax_outside)
    assert forward_findings(report) == {"critical-op-in-half"}
    assert first_line(report, "critical-op-in-half") == marked(softmax_outside)


def test_a_critical_operation_promoted(tmp_path: Path) -> None:
    report = run(tmp_path, lambda h: torch.softmax(h.float(), -1).to(h.dtype))
    assert forward_findings(report) == set()
    assert "critical-op-in-half" not in informing(report)


def test_one_bad_batch_that_nobody_watched(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x * (1e6 if step == 7 else 1.0)).float(), y)

    report = fit(tmp_path, mlp(), loss, steps=25, scaler=dynamic(init_scale=2.0**10), every=50)
    assert forward_findings(report) == {"unlocated-nonfinite"}
    finding = the(report, "unlocated-nonfinite")
    assert finding.steps == (7, 7)
    assert report.verdict.level == "attention"


def test_two_faults_are_two_findings(tmp_path: Path) -> None:
    def code(h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(product(h)) + torch.tanh(h.square().sum(-1, keepdim=True))

    report = run(tmp_path, code, size=300.0)
    assert {"forward-overflow", "reduction-overflow"} <= forward_findings(report)
    roots = {finding.id for finding in report.findings if finding.consequence_of is None}
    assert {"forward-overflow", "reduction-overflow"} <= roots
