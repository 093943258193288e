"""Settings put on real GradScalers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import gradaudit
from gradaudit.capture.apply import apply_to_new_scalers


@dataclass(frozen=True)
class Settings:
    init_scale: float = 1024.0
    growth_interval: int = 7
    growth_factor: float = 4.0
    backoff_factor: float = 0.25


def settings_of(scaler: torch.amp.GradScaler) -> tuple[float, int, float, float]:
    return (
        scaler.get_scale(),
        scaler.get_growth_interval(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
    )


def test_a_scaler_not_used_yet_starts_with_the_settings() -> None:
    scaler = torch.amp.GradScaler("cpu")

    gradaudit.apply(Settings(), scaler)
    scaler.scale(torch.ones(()))

    assert settings_of(scaler) == (1024.0, 7, 4.0, 0.25)


def test_a_scaler_in_use_goes_on_with_the_settings() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    gradaudit.apply(Settings(), scaler)

    assert settings_of(scaler) == (1024.0, 7, 4.0, 0.25)
    assert scaler.scale(torch.ones(())).item() == 1024.0


def test_a_disabled_scaler_stays_disabled() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    gradaudit.apply(Settings(), scaler)

    assert not scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 1.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (None, "no recommendation to apply"),
        (Settings(init_scale=0.0), "init_scale is 0.0; it must be above 0 and finite"),
        (Settings(init_scale=float("inf")), "init_scale is inf"),
        (Settings(growth_interval=0), "growth_interval is 0; it must be 1 or more"),
        (Settings(growth_factor=1.0), "growth_factor is 1.0; it must be above 1"),
        (Settings(backoff_factor=1.0), "backoff_factor is 1.0; it must be above 0 and below 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_range(settings: Settings | None, sentence: str) -> None:
    scaler = torch.amp.GradScaler("cpu")

    with pytest.raises(ValueError, match=sentence):
        gradaudit.apply(settings, scaler)

    assert scaler.get_growth_interval() == 2000


def test_new_scalers_get_the_settings_until_it_is_undone() -> None:
    undo = apply_to_new_scalers(Settings())
    try:
        inside = torch.amp.GradScaler("cpu", init_scale=3.0)
    finally:
        undo()
    outside = torch.amp.GradScaler("cpu")

    assert settings_of(inside) == (1024.0, 7, 4.0, 0.25)
    assert settings_of(outside) == (65536.0, 2000, 2.0, 0.5)
