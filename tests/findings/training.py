"""Small, ordinary FP16 trainings on the CPU, recorded and audited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gradaudit
from gradaudit.analysis.report import AuditReport, Finding

WIDTH = 32
NUM_CLASSES = 8
BATCH = 32

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[nn.Module, int], torch.Tensor]


def half() -> Any:
    """FP16 autocast on the CPU."""
    return torch.autocast("cpu", dtype=torch.float16)


def dynamic(**more: Any) -> torch.amp.GradScaler:
    """torch's own scaler, with torch's own settings unless said."""
    return torch.amp.GradScaler("cpu", **more)


def numbers(step: int, *shape: int) -> torch.Tensor:
    """Inputs of one step, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def labels(step: int, *shape: int, num_classes: int = NUM_CLASSES) -> torch.Tensor:
    return torch.randint(num_classes, shape, generator=torch.Generator().manual_seed(step))


def classes(step: int, batch: int = BATCH) -> Batch:
    """A task that can be learned: inputs, and which of the first few of them is largest."""
    x = numbers(step, batch, WIDTH)
    return x, x[:, :NUM_CLASSES].argmax(1)


def images(step: int, batch: int = 16) -> Batch:
    x = numbers(step, batch, 3, 8, 8)
    return x, x.mean((2, 3)).argmax(1)


def mlp(depth: int = 2, width: int = WIDTH, out: int = NUM_CLASSES, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, out))


def convnet(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class Encoder(nn.Module):
    """A transformer encoder over tokens, with padding if asked."""

    def __init__(self, layers: int = 1, dropout: float = 0.0, vocabulary: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding))
        return logits


def encoder(seed: int = 0, **more: Any) -> Encoder:
    torch.manual_seed(seed)
    return Encoder(**more)


class Recurrent(nn.Module):
    """A GRU cell unrolled over a sequence: the fused kernel does not run in FP16 on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(len(tokens), WIDTH)
        for t in range(tokens.shape[1]):
            state = self.cell(self.embed(tokens[:, t]), state)
        logits: torch.Tensor = self.head(state)
        return logits


def recurrent(seed: int = 0) -> Recurrent:
    torch.manual_seed(seed)
    return Recurrent()


def classification(model: nn.Module, step: int) -> torch.Tensor:
    x, y = classes(step)
    return F.cross_entropy(model(x), y)


def picture_classification(model: nn.Module, step: int) -> torch.Tensor:
    x, y = images(step)
    return F.cross_entropy(model(x), y)


def copying(model: nn.Module, step: int) -> torch.Tensor:
    """Tell every token."""
    tokens = labels(step, 8, 6, num_classes=20)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def first_token(model: nn.Module, step: int) -> torch.Tensor:
    """Tell the first token of a sequence."""
    tokens = labels(step, 16, 5, num_classes=20)
    return F.cross_entropy(model(tokens), tokens[:, 0])


def fit(
    path: Path,
    model: nn.Module,
    loss: Loss = classification,
    *,
    steps: int = 60,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    every: int = 5,
    dtype: torch.dtype | None = torch.float16,
    clip: float | None = None,
    accumulate: int = 1,
    update: Callable[[], object] | None = None,
    after: Callable[[int], object] = lambda step: None,
) -> AuditReport:
    """The plain training loop, recorded.

    Args:
        path: Run folder.
        model: Trained in place.
        loss: Of the model at a step.
        steps: Attempted updates.
        scaler: None for a plain backward and step.
        optimizer: AdamW unless given.
        every: Steps between histograms.
        dtype: Of autocast; None without.
        clip: Largest gradient norm, after unscaling.
        accumulate: Micro-batches per update.
        update: Called in place of the scaler's update.
        after: Called at the end of every step.
    """
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    with gradaudit.attach(model, optimizer, scaler, out=path, every=every) as audit:
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(accumulate):
                with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    value = loss(model, step * accumulate + micro) / accumulate
                (scaler.scale(value) if scaler else value).backward()
            if scaler and clip is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler:
                scaler.step(optimizer)
                (update or scaler.update)()
            else:
                optimizer.step()
            after(step)
    return audit.report()


def times(loss: Loss, factor: float) -> Loss:
    """The same loss, larger or smaller."""
    return lambda model, step: loss(model, step) * factor


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))
        self.small = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.trunk(x))
        return self.large(hidden), self.small(hidden)


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


def alarming(report: AuditReport) -> dict[str, str]:
    """Ids of errors and warnings with their severity."""
    found = [(finding.id, finding.severity) for finding in report.findings if finding.severity != "info"]
    assert len(found) == len(dict(found)), "one finding twice"
    return dict(found)


def informing(report: AuditReport) -> set[str]:
    """Ids of what is normal and worth knowing."""
    return {finding.id for finding in report.findings if finding.severity == "info"}


def the(report: AuditReport, name: str) -> Finding:
    """The one finding of an id."""
    (finding,) = [finding for finding in report.findings if finding.id == name]
    return finding


def evidence(finding: Finding) -> dict[str, Any]:
    """A finding's numbers by name."""
    return {item.name: item.value for item in finding.evidence}


def places(finding: Finding) -> set[str]:
    """Names of a finding's places."""
    return {place.name for place in finding.where}


SCALE_COURSES = {
    "scale-zero", "scale-at-floor", "scale-collapse", "scale-decay", "scale-thrashing", "scale-hunting",
    "scale-calibration",
}  # fmt: skip


def assert_sound(report: AuditReport) -> None:
    """What holds for every report: all checks ran, one verdict on the scale, a level that follows from the findings."""
    assert [check for check in report.checks if check.status == "errored"] == []
    assert len(SCALE_COURSES & {finding.id for finding in report.findings}) <= 1
    severities = {finding.severity for finding in report.findings}
    expected = "failing" if "error" in severities else "attention" if "warning" in severities else "healthy"
    assert report.verdict.level == expected
    assert report.run.num_applied + report.run.num_skipped == report.run.num_steps
    for finding in report.findings:
        assert 0 <= finding.steps[0] <= finding.steps[1] < report.run.num_steps
        assert finding.summary
        assert finding.remedy


def assert_healthy(report: AuditReport) -> None:
    """No alarm, and nothing to change."""
    assert_sound(report)
    assert alarming(report) == {}
    assert report.verdict.level == "healthy"
    if report.recommendation is not None:
        assert not report.recommendation.change_needed
