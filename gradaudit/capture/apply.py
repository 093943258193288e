"""Put recommended settings onto a GradScaler: a live one, or every one that a script is about to build."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch


class ScalerSettings(Protocol):
    """What `apply` reads: a recommendation, or anything with the same four numbers."""

    @property
    def init_scale(self) -> float:
        """Scale to start from, above 0 and finite."""

    @property
    def growth_interval(self) -> int:
        """Clean steps before the scale grows, 1 or more."""

    @property
    def growth_factor(self) -> float:
        """Above 1."""

    @property
    def backoff_factor(self) -> float:
        """Above 0 and below 1."""


def apply(recommendation: ScalerSettings | None, scaler: Any) -> None:
    """Set recommended settings on a GradScaler, live or fresh. A disabled scaler stays as it is.

    Args:
        recommendation: From a report; its init_scale becomes the scale in force.
        scaler: A torch.amp.GradScaler or subclass.

    Raises:
        ValueError: There is no recommendation, or one of its numbers is out of range.

    Sync: none.
    """
    settings = checked(recommendation)
    if not scaler.is_enabled():
        return
    scaler.set_growth_factor(settings.growth_factor)
    scaler.set_backoff_factor(settings.backoff_factor)
    scaler.set_growth_interval(settings.growth_interval)
    if scaler._scale is None:
        scaler._init_scale = settings.init_scale  # not on a device yet: the first scale() puts it there
    else:
        scaler.update(settings.init_scale)


def apply_to_new_scalers(settings: ScalerSettings) -> Callable[[], None]:
    """Set the settings on every GradScaler built from now on, until the returned function is called."""
    settings = checked(settings)
    cls: Any = torch.amp.grad_scaler.GradScaler
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        apply(settings, self)

    cls.__init__ = init

    def undo() -> None:
        if cls.__init__ is init:
            cls.__init__ = original

    return undo


def checked(settings: ScalerSettings | None) -> ScalerSettings:
    """The settings, if a GradScaler can work with them.

    Raises:
        ValueError: Says which number is out of which range.
    """
    if settings is None:
        raise ValueError("There is no recommendation to apply: nothing of the run was in FP16.")
    if not (0 < settings.init_scale < float("inf")):
        raise ValueError(f"init_scale is {settings.init_scale}; it must be above 0 and finite.")
    if settings.growth_interval < 1:
        raise ValueError(f"growth_interval is {settings.growth_interval}; it must be 1 or more.")
    if not settings.growth_factor > 1:
        raise ValueError(f"growth_factor is {settings.growth_factor}; it must be above 1.")
    if not (0 < settings.backoff_factor < 1):
        raise ValueError(f"backoff_factor is {settings.backoff_factor}; it must be above 0 and below 1.")
    return settings
