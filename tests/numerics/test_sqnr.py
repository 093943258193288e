"""The promise on predicted SQNR: a histogram recorded once tells how noisy a gradient is at any scale.

Measured: the FP16 gradient at a scale against the FP32 gradient of the same batch, by tensor hooks of this file's own.
Predicted: from one recording at 2^16. Compared wherever the measured value lies at least 6 dB under the network's
plateau, above which not the scale but the forward's rounding decides.

Convolutions are emulated as FP32 kernels rounded to FP16, as tensor cores do them: the CPU's own accumulate in half and
are noisier than one rounding by some 9 dB, which no histogram shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradaudit
from gradaudit.analysis.noise import own_noise, total_noise
from gradaudit.store import open_run
from gradaudit.store.tables import only

Loss = Callable[[nn.Module], torch.Tensor]

RECORDED_LOG2 = 16
SCALES_LOG2 = tuple(range(-20, 21))
BELOW_PLATEAU_DB = 6.0
BOUND_DB = 3.0
"""Every module output's gradient, at every scale below the plateau, in all three networks."""
NOTHING_LEFT_DB = 0.5
BOUND_WITH_NOTHING_LEFT_DB = 5.0
"""The same where the error is as large as the gradient: how much larger makes no difference to anybody."""

WEIGHT_FLOOR_DB = 12.0
WEIGHT_BOUND_DB = (-7.5, 15.0)
"""Weight gradients, where the measured value exceeds 12 dB: how errors add up over a batch depends on signs, which a
histogram does not hold. Worst, and too optimistic, are the layer of the logits, where many small probabilities of one
sign flush together, and a convolution before a norm."""


def deep_mlp() -> tuple[nn.Module, Loss]:
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    x, y = torch.randn(128, 64), torch.randint(0, 10, (128,))
    return model, lambda model: F.cross_entropy(model(x).float(), y)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(48, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embed(tokens)))
        return logits


def transformer() -> tuple[nn.Module, Loss]:
    model = Encoder()
    tokens, targets = torch.randint(0, 50, (8, 16)), torch.randint(0, 50, (8, 16))
    return model, lambda model: F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


class RoundedConvolution(torch.autograd.Function):
    """Computed in FP32, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x.float(), weight.float(), padding=1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        for_x = torch.nn.grad.conv2d_input(x.shape, weight.float(), grad.float(), padding=1)
        for_weight = torch.nn.grad.conv2d_weight(x.float(), weight.shape, grad.float(), padding=1)
        return for_x.to(x.dtype), for_weight.to(weight.dtype)


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3) * (2 / (9 * inputs)) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.float16 if torch.is_autocast_enabled("cpu") else x.dtype
        result: torch.Tensor = RoundedConvolution.apply(x.to(dtype), self.weight.to(dtype))
        return result


def convnet() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(
        Convolution(3, 16), nn.BatchNorm2d(16), nn.ReLU(), Convolution(16, 16), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2), Convolution(16, 32), nn.ReLU(), Convolution(32, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    x, y = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))
    return model, lambda model: F.cross_entropy(model(x).float(), y)


NETWORKS = {"mlp": deep_mlp, "transformer": transformer, "convnet": convnet}


@dataclass
class Comparison:
    """Predicted minus measured of one gradient at one scale."""

    name: str
    is_weight: bool
    scale_log2: int
    predicted_db: float
    measured_db: float

    @property
    def error_db(self) -> float:
        return self.predicted_db - self.measured_db

    @property
    def bound_db(self) -> float:
        return BOUND_DB if self.measured_db > NOTHING_LEFT_DB else BOUND_WITH_NOTHING_LEFT_DB


def gradients(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], scale: float | None
) -> dict[str, torch.Tensor]:
    """Unscaled gradients of module outputs and parameters in float64; in FP32 where no scale is given."""
    found: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def keep(grad: torch.Tensor) -> None:
            found[name] = grad.detach().double() / (scale or 1.0)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            (output if isinstance(output, torch.Tensor) else output[0]).register_hook(keep)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16, enabled=scale is not None):
        value = loss(model)
    (value * (scale or 1.0)).backward()
    for handle in handles:
        handle.remove()
    for name, param in model.named_parameters():
        assert param.grad is not None
        found[name] = param.grad.detach().double() / (scale or 1.0)
    return found


def measure(model: nn.Module, loss: Loss) -> dict[tuple[str, int], float]:
    reference = gradients(model, loss, None)
    measured = {}
    for scale_log2 in SCALES_LOG2:
        found = gradients(model, loss, 2.0**scale_log2)
        for name, exact in reference.items():
            error = float((found[name] - exact).square().sum() / exact.square().sum())
            measured[name, scale_log2] = -10 * np.log10(error) if np.isfinite(error) else float("nan")
    return measured


def predict(model: nn.Module, loss: Loss, path: Path) -> dict[tuple[str, int], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**RECORDED_LOG2)
    with gradaudit.attach(model, optimizer, scaler, out=path, every=1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss(model)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    run = open_run(path)
    tensors = run.tensors()
    samples = only(run.samples(), tensors, ("output_grad", "op_grad", "param_grad"))
    own = own_noise(samples, tensors, np.array(SCALES_LOG2) - RECORDED_LOG2)
    total_db = total_noise(samples, tensors, own).sqnr_db()
    predicted = {}
    for row, t in enumerate(samples.tensor):
        if tensors[t].kind in ("output_grad", "param_grad"):
            predicted |= {(tensors[t].fqn, k): float(total_db[row, i]) for i, k in enumerate(SCALES_LOG2)}
    return predicted


CASES = [(name, seed) for name in NETWORKS for seed in (0, 1, 2)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def comparisons(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Comparison]:
    """Every gradient at every scale at which the measured value lies below the plateau."""
    name, seed = request.param
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, loss = NETWORKS[name]()
    measured = measure(model, loss)
    predicted = predict(model, loss, tmp_path_factory.mktemp("run") / "run")
    weights = dict(model.named_parameters())
    found: list[Comparison] = []
    for gradient in {gradient for gradient, _ in measured if (gradient, SCALES_LOG2[0]) in predicted}:
        plateau = np.nanmax([measured[gradient, k] for k in SCALES_LOG2])
        found += [
            Comparison(gradient, gradient in weights, k, predicted[gradient, k], measured[gradient, k])
            for k in SCALES_LOG2
            if measured[gradient, k] < plateau - BELOW_PLATEAU_DB
        ]
    return found


def test_module_outputs_are_predicted_within_3_db(comparisons: list[Comparison]) -> None:
    outputs = [entry for entry in comparisons if not entry.is_weight]
    wrong = [entry for entry in outputs if abs(entry.error_db) > entry.bound_db]

    assert len({entry.scale_log2 for entry in outputs}) >= 8
    assert len(outputs) > 90
    assert wrong == []
    assert abs(float(np.median([entry.error_db for entry in outputs]))) < 1.0


def test_weight_gradients_are_predicted_roughly(comparisons: list[Comparison]) -> None:
    weights = [entry for entry in comparisons if entry.is_weight and entry.measured_db > WEIGHT_FLOOR_DB]
    low, high = WEIGHT_BOUND_DB

    assert len(weights) > 10
    assert [entry for entry in weights if not low <= entry.error_db <= high] == []
    assert abs(float(np.median([entry.error_db for entry in weights]))) < 5.0
