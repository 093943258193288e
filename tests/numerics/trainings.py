"""What the trainings of the zoo are made of: each is a recipe that builds everything anew and says what a step does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH = 16


@dataclass
class Training:
    """`step(i)` does iteration i, with `num_updates` optimizer updates, and returns its losses."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[int], list[torch.Tensor]]
    scaler: torch.amp.GradScaler | None = None
    num_updates: float = 1


Recipe = Callable[[], Training]


def scaler(**more: Any) -> torch.amp.GradScaler:
    """A scaler that overflows, backs off and grows within a few steps."""
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 5, **more})


def half() -> Any:
    """FP16 autocast on the CPU."""
    return torch.autocast("cpu", dtype=torch.float16)


def batch(i: int, *shape: int) -> torch.Tensor:
    """Reproducible inputs that leave the global generator alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i))


def supervised(
    model: nn.Module,
    *,
    loss: Callable[[nn.Module, int], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = torch.float16,
    clip: float | None = None,
    accumulate: int = 1,
) -> Training:
    """The plain loop, with and without a scaler, clipping, accumulation."""
    params = [param for param in model.parameters() if param.requires_grad]
    opt = optimizer or torch.optim.AdamW(params, lr=1e-2)

    def step(i: int) -> list[torch.Tensor]:
        opt.zero_grad()
        losses = []
        for micro in range(accumulate):
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                value = loss(model, i * accumulate + micro) / accumulate
            (scaler.scale(value) if scaler else value).backward()
            losses.append(value.detach())
        if clip is not None:
            if scaler:
                scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(params, max_norm=clip)
        if scaler:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
        return losses

    return Training([model], [opt], step, scaler)


def regression(out: Callable[[Any], torch.Tensor] = lambda y: y) -> Callable[[nn.Module, int], torch.Tensor]:
    """Mean square of the model's output on a random batch."""
    return lambda model, i: out(model(batch(i, 8, WIDTH))).float().square().mean()


def mlp(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=bias))
