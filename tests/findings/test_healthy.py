"""Ordinary trainings with nothing wrong: no alarm, and no advice to change anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradaudit
from gradaudit.analysis.report import AuditReport
from tests.findings.conftest import Script
from tests.findings.training import (
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
    first_token,
    fit,
    half,
    informing,
    labels,
    mlp,
    numbers,
    picture_classification,
    recurrent,
)


def perceptron(path: Path) -> AuditReport:
    return fit(path, mlp(3), scaler=dynamic(), steps=100)


def twenty_layers_deep(path: Path) -> AuditReport:
    model = mlp(20)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    return fit(path, model, scaler=dynamic(), steps=40)


def convolutions(path: Path) -> AuditReport:
    return fit(path, convnet(), picture_classification, scaler=dynamic(), clip=1.0)


def attention_with_dropout(path: Path) -> AuditReport:
    return fit(path, encoder(layers=2, dropout=0.2), copying, scaler=dynamic(), clip=1.0)


def recurrence(path: Path) -> AuditReport:
    return fit(path, recurrent(), first_token, scaler=dynamic())


def accumulation_with_clipping(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(), accumulate=4, clip=0.5, steps=40)


def stochastic_descent_with_momentum(path: Path) -> AuditReport:
    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return fit(path, model, scaler=dynamic(), optimizer=optimizer)


def fused_optimizer(path: Path) -> AuditReport:
    optimizer = torch.optim.AdamW((model := mlp()).parameters(), lr=2e-3, fused=True)
    return fit(path, model, scaler=dynamic(init_scale=2.0**20), optimizer=optimizer)


def bf16_without_a_scaler(path: Path) -> AuditReport:
    return fit(path, encoder(), copying, dtype=torch.bfloat16)


def fp32_without_anything(path: Path) -> AuditReport:
    return fit(path, convnet(), picture_classification, dtype=None)


def loss_summed_over_a_big_batch(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step, 256)
        return F.cross_entropy(model(x), y, reduction="sum")

    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=1e-4)
    return fit(path, model, loss, scaler=dynamic(), optimizer=optimizer)


def loss_in_half_costs_the_first_step(path: Path) -> AuditReport:
    """The gradient of a half loss is the scale itself, and 65,536 is inf in half."""

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = numbers(step, 16, WIDTH)
        return (model(x) - x[:, :8].half()).abs().mean()

    return fit(path, mlp(), loss, scaler=dynamic())


def gradient_checkpointing(path: Path) -> AuditReport:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))
            self.head = nn.Linear(WIDTH, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            logits: torch.Tensor = self.head(x)
            return logits

    torch.manual_seed(0)
    return fit(path, Checkpointed(), scaler=dynamic(), steps=40)


def causal_attention_with_minus_infinity(path: Path) -> AuditReport:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 20)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.embed(tokens)).chunk(3, dim=-1)
            scores = q @ k.transpose(1, 2) / WIDTH**0.5
            past = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            weights = torch.softmax(scores.masked_fill(~past, float("-inf")), dim=-1)
            logits: torch.Tensor = self.out(weights.to(v.dtype) @ v)
            return logits

    torch.manual_seed(0)
    return fit(path, Causal(), copying, scaler=dynamic())


def a_batch_without_finite_loss_now_and_then(path: Path) -> AuditReport:
    """Two bad batches in a hundred: the scaler skips them, and that is what it is for."""

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (float("nan") if step in (31, 70) else 1.0)

    return fit(path, mlp(), loss, scaler=dynamic(), steps=100)


def adversaries_with_one_scaler(path: Path) -> AuditReport:
    torch.manual_seed(0)
    generator, critic = mlp(1, out=WIDTH), mlp(1, out=1)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (generator, critic)]
    scaler = dynamic()
    with gradaudit.attach(generator, optimizers[0], scaler, out=path, every=5) as audit:
        for step in range(60):
            real, noise = numbers(step, 32, WIDTH), numbers(step + 1000, 32, WIDTH)
            with half():
                fake = generator(noise)
                good, bad = critic(real), critic(fake.detach())
                loss = F.softplus(-good).mean() + F.softplus(bad).mean()
            optimizers[1].zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizers[1])
            with half():
                loss = F.softplus(-critic(fake)).mean()
            optimizers[0].zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizers[0])
            scaler.update()
    return audit.report()


def adversaries_with_a_scaler_each(path: Path) -> AuditReport:
    torch.manual_seed(0)
    generator, critic = mlp(1, out=WIDTH), mlp(1, out=1)
    nets = [(critic, dynamic(init_scale=2.0**20)), (generator, dynamic(init_scale=2.0**24))]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net, _ in nets]
    with gradaudit.attach(generator, out=path, every=5) as audit:
        for step in range(60):
            for turn, (_, scaler) in enumerate(nets):
                with half():
                    fake = generator(numbers(step + 1000, 32, WIDTH))
                    good, bad = critic(numbers(step, 32, WIDTH)), critic(fake if turn else fake.detach())
                    loss = F.softplus(-bad).mean() if turn else F.softplus(-good).mean() + F.softplus(bad).mean()
                optimizers[turn].zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizers[turn])
                scaler.update()
    return audit.report()


def two_optimizers_on_one_loss(path: Path) -> AuditReport:
    model = encoder()
    rest = [param for name, param in model.named_parameters() if not name.startswith("embed")]
    optimizers = [torch.optim.SGD(model.embed.parameters(), lr=0.1), torch.optim.AdamW(rest, lr=2e-3)]
    scaler = dynamic()
    with gradaudit.attach(model, out=path, every=5) as audit:
        for step in range(50):
            with half():
                loss = copying(model, step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
    return audit.report()


def several_losses_of_like_size(path: Path) -> AuditReport:
    torch.manual_seed(0)
    model = nn.ModuleDict({"trunk": mlp(1, out=WIDTH), "a": nn.Linear(WIDTH, 8), "b": nn.Linear(WIDTH, 1)})

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        hidden = torch.relu(model["trunk"](x))
        return F.cross_entropy(model["a"](hidden), y) + F.mse_loss(model["b"](hidden).squeeze(1).float(), x.mean(1))

    return fit(path, model, loss, scaler=dynamic())


def validation_between_the_steps(path: Path) -> AuditReport:
    model = mlp()

    def after(step: int) -> None:
        if step % 10 == 9:
            model.eval()
            with torch.no_grad(), half():
                classification(model, 10_000 + step)
            model.train()

    return fit(path, model, scaler=dynamic(), after=after)


def tied_weights(path: Path) -> AuditReport:
    model = encoder()
    model.head.weight = model.embed.weight
    return fit(path, model, copying, scaler=dynamic())


def ignored_labels(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens = labels(step, 8, 6, num_classes=20)
        targets = tokens.masked_fill(labels(step + 1, 8, 6, num_classes=10) > 0, -100)
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return fit(path, encoder(), loss, scaler=dynamic())


@pytest.mark.parametrize(
    "script",
    [
        perceptron, twenty_layers_deep, convolutions, attention_with_dropout, recurrence, accumulation_with_clipping,
        stochastic_descent_with_momentum, fused_optimizer, bf16_without_a_scaler, fp32_without_anything,
        loss_summed_over_a_big_batch, loss_in_half_costs_the_first_step, gradient_checkpointing,
        causal_attention_with_minus_infinity, adversaries_with_one_scaler,
        adversaries_with_a_scaler_each, two_optimizers_on_one_loss, several_losses_of_like_size,
        validation_between_the_steps, tied_weights, ignored_labels,
    ],
)  # fmt: skip
def test_nothing_is_wrong(script: Script, tmp_path: Path) -> None:
    report = script(tmp_path / "run")

    assert_healthy(report)
    assert informing(report) <= {"scale-calibration", "scale-hunting", "gradient-headroom-low", "critical-op-in-half"}
    assert report.run.complete
    assert report.run.num_sampled >= 8


def test_batches_without_finite_loss_now_and_then_are_only_mentioned(tmp_path: Path) -> None:
    report = a_batch_without_finite_loss_now_and_then(tmp_path / "run")

    assert_sound(report)
    assert alarming(report) == {"unlocated-nonfinite": "warning"}


def record_one_step(path: Path, steps: int) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(), steps=steps, every=1)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_shortest_runs_are_healthy_too(steps: int, tmp_path: Path) -> None:
    report = record_one_step(tmp_path / "run", steps)

    assert_healthy(report)
    assert report.run.num_steps == steps
