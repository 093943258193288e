"""Synthetic runs in the shapes that a page must survive, through the real writer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests import factory

ELEMENTS = 4096
HOSTILE = '<b>&"\'$<a href="https://evil.example">x</a>'
"""A layer name that would become a link if it entered a figure as it is."""


def bell(centre: float, *, spread: float = 3.0, elements: int = ELEMENTS) -> dict[int, int]:
    """Elements per exponent of a bell around `centre`."""
    weights = {
        e: math.exp(-0.5 * ((e + 0.5 - centre) / spread) ** 2) for e in range(int(centre) - 14, int(centre) + 15)
    }
    total = sum(weights.values())
    return {e: round(elements * weight / total) for e, weight in weights.items() if round(elements * weight / total)}


def recorded(step: int, tensor: int, centre: float, scale: float, **more: Any) -> dict[str, Any]:
    """A sample of a gradient around 2^centre unscaled, as FP16 holds it at `scale`: flushed values are zeros."""
    shift = round(math.log2(scale))
    moved = {e + shift: n for e, n in bell(centre).items()}
    lost = sum(n for e, n in moved.items() if e < -25)
    over = sum(n for e, n in moved.items() if e > 15)
    kept = {e: n for e, n in moved.items() if -25 <= e <= 15}
    zero, inf = more.pop("num_zero", 0) + lost, more.pop("num_inf", 0) + over
    return factory.sample(step, tensor, kept, scale=scale, num_zero=zero, num_inf=inf, **more)


def blocks(count: int) -> list[dict[str, Any]]:
    """Tensor rows of a transformer-like model, the last layer nearest to the loss (order 0)."""
    names = ("attn.q_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    return [
        factory.tensor(
            i, f"model.layers.{i // 4}.{names[i % 4]}", shape=[8, 512], parents=[i + 1] if i + 1 < count else []
        )
        for i in range(count)
    ]


def training(
    path: Path, *, layers: int = 12, num_steps: int = 40, every: int = 1, scale: float = 65536.0, centre: float = -14.0,
    slope: float = 0.0, skipped: tuple[int, ...] = (), flush_every: int | None = None, **meta: Any,
) -> Path:  # fmt: skip
    """A run whose gradients shrink by `slope` binades per layer away from the loss; each skip halves the scale."""
    steps, samples = [], []
    for index in range(num_steps):
        sampled = index % every == 0
        skip = index in skipped
        steps.append(
            factory.step(
                index, scale=scale, sampled=sampled, skipped=skip, found_inf=skip, loss=2.0 - index / num_steps,
                nonfinite=[0] if skip else [],
            )
        )  # fmt: skip
        if sampled:
            for layer in range(layers):
                drift = centre - slope * (layers - 1 - layer) + 0.3 * math.sin(index + layer)
                order = layers - 1 - layer
                samples.append(recorded(index, layer, drift, scale, num_zero=ELEMENTS // 4, order=order))
        if skip:
            scale /= 2
    run_meta = factory.meta(blocks(layers), **meta)
    return factory.write_run(path, run_meta=run_meta, steps=steps, samples=samples, flush_every=flush_every)


def healthy(path: Path) -> Path:
    """Nothing wrong: one start-up overflow, all gradients in the middle of FP16."""
    return training(path, skipped=(0,), centre=-14.0)


def underflowing(path: Path) -> Path:
    """Early layers sink into the subnormals and below."""
    return training(path, layers=16, num_steps=60, scale=256.0, centre=-18.0, slope=1.2)


def empty(path: Path, **meta: Any) -> Path:
    """A run that has not made a step."""
    return factory.write_run(path, run_meta=factory.meta(blocks(2), **meta))


def one_step(path: Path) -> Path:
    """A single sampled step of a single layer."""
    return training(path, layers=1, num_steps=1)


def all_nan(path: Path) -> Path:
    """Every gradient is NaN at every step, and every step is skipped."""
    tensors = blocks(3)
    steps = [factory.step(i, skipped=True, found_inf=True, loss=math.nan, loss_finite=False) for i in range(5)]
    samples = [factory.sample(i, t, {}, num_nan=64) for i in range(5) for t in range(3)]
    return factory.write_run(path, run_meta=factory.meta(tensors), steps=steps, samples=samples)


def all_zero(path: Path) -> Path:
    """Every gradient is exactly zero."""
    samples = [factory.sample(i, t, {}, num_zero=64) for i in range(5) for t in range(3)]
    steps = [factory.step(i) for i in range(5)]
    return factory.write_run(path, run_meta=factory.meta(blocks(3)), steps=steps, samples=samples)


def hostile(path: Path) -> Path:
    """Names that would be HTML, twice the same one, one without any characters."""
    names = (HOSTILE, HOSTILE, "", "a\nb\x1b[31m", "layer " + "x" * 400)
    tensors = [factory.tensor(i, name) for i, name in enumerate(names)]
    steps = [factory.step(i) for i in range(3)]
    samples = [recorded(i, t, -14.0, 65536.0) for i in range(3) for t in range(len(names))]
    return factory.write_run(path, run_meta=factory.meta(tensors), steps=steps, samples=samples)


def broken(path: Path) -> Path:
    """A folder whose run.json is no JSON."""
    path.mkdir(parents=True)
    (path / "run.json").write_text("{", encoding="utf-8")
    return path


def torn(path: Path) -> Path:
    """A run with a part that is no Parquet file."""
    training(path, layers=2, num_steps=3)
    (path / "rank-00000" / "samples-000000.parquet").write_bytes(b"PAR1 torn")
    return path
