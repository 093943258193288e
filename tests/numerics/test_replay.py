"""What replay says of other settings, against running the same training again with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import gradaudit
from gradaudit.analysis.context import Analysis, analyse
from gradaudit.analysis.replay import ReplayResult, TorchPolicy, replay
from gradaudit.store import open_run

STEPS = 300


@dataclass
class Trained:
    """What a training really did."""

    skipped: list[bool]
    scales: list[float]


def train(policy: TorchPolicy, *, factor: float = 1.0, path: Path | None = None) -> Trained:
    """A digits classifier, the same at every call but for the scaler's settings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=policy.init_scale,
        growth_interval=policy.growth_interval,
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
    )
    audit = gradaudit.attach(model, optimizer, scaler, out=path, every=5) if path is not None else None
    trained = Trained([], [])
    for step in range(STEPS):
        batch = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x[batch]), y[batch]) * factor
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        trained.skipped.append(not all(bool(torch.isfinite(grad).all()) for grad in grads))
        scaler.step(optimizer)
        scaler.update()
        trained.scales.append(before)
    if audit is not None:
        audit.close()
    return trained


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """One recording, with torch's own settings."""
    path = tmp_path_factory.mktemp("run") / "run"
    train(TorchPolicy(), path=path)
    return analyse(open_run(path))


SETTINGS = {
    "hunting every 10 steps": TorchPolicy(growth_interval=10),
    "from 2^30 down": TorchPolicy(init_scale=2.0**30, growth_interval=25),
    "from 2^4 up, in large steps": TorchPolicy(init_scale=16.0, growth_interval=7, growth_factor=4.0),
    "gently": TorchPolicy(init_scale=2.0**20, growth_interval=5, growth_factor=1.5, backoff_factor=0.7),
    "with a steep backoff": TorchPolicy(init_scale=2.0**24, growth_interval=4, backoff_factor=0.125),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_replay_foretells_what_other_settings_do(name: str, recorded: Analysis) -> None:
    policy = SETTINGS[name]
    really = train(policy)
    foretold = replay(recorded, policy)

    num_skipped = sum(really.skipped)
    assert abs(foretold.num_skipped - num_skipped) <= max(2, 0.1 * num_skipped)
    assert foretold.num_skipped_low - 2 <= num_skipped <= foretold.num_skipped_high + 2
    difference = np.log2(foretold.scale) - np.log2(really.scales)
    assert abs(float(difference.mean())) < 0.5
    assert foretold.num_steps == STEPS == len(foretold.scale)


def test_replaying_the_settings_that_were_used_gives_what_happened(tmp_path: Path) -> None:
    policy = TorchPolicy(init_scale=2.0**26, growth_interval=15)
    really = train(policy, path=tmp_path / "run")
    foretold = replay(open_run(tmp_path / "run"), policy)

    assert foretold.skipped.tolist() == really.skipped
    assert foretold.scale.tolist() == really.scales


def test_a_lower_scale_than_the_recorded_one_is_foretold_by_bounds(tmp_path: Path) -> None:
    """Recorded far too high: every step overflowed, and how far down the limit lies is not on record."""
    policy = TorchPolicy(init_scale=2.0**100, growth_interval=1, backoff_factor=0.99)
    train(policy, path=tmp_path / "run")
    foretold = replay(open_run(tmp_path / "run"), TorchPolicy())

    assert foretold.num_skipped_low <= foretold.num_skipped <= foretold.num_skipped_high
    assert foretold.num_skipped_low == 0
    assert foretold.num_skipped_high == STEPS


def test_a_forward_that_is_not_finite_overflows_at_every_scale(tmp_path: Path) -> None:
    train(TorchPolicy(), factor=float("nan"), path=tmp_path / "run")
    foretold = replay(open_run(tmp_path / "run"), TorchPolicy(init_scale=2.0**-10))

    assert foretold.num_skipped == foretold.num_skipped_low == foretold.num_skipped_high == STEPS


@pytest.mark.parametrize(
    ("fact", "policy"),
    [
        (lambda r: r.num_skipped == 0, TorchPolicy(init_scale=1.0)),
        (lambda r: r.min_sqnr_db < 45, TorchPolicy(init_scale=2.0**-12)),
        (lambda r: r.min_sqnr_db > 60, TorchPolicy(init_scale=2.0**16)),
    ],
)
def test_a_small_scale_skips_nothing_and_drowns_in_noise(
    fact: Callable[[ReplayResult], bool], policy: TorchPolicy, recorded: Analysis
) -> None:
    assert fact(replay(recorded, policy))
