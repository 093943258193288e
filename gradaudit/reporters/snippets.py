"""Settings as code to paste."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradaudit.analysis.report import Recommendation


def torch_lines(recommendation: Recommendation, meta: Mapping[str, Any]) -> list[str]:
    """Python to paste into a plain PyTorch script; empty when the settings may stay.

    Args:
        recommendation: What to write down.
        meta: run.json, for the device and the scaler's class.
    """
    if not recommendation.change_needed:
        return []
    autocast = meta.get("autocast") or [{}]
    device = autocast[0].get("device", "cuda")
    if recommendation.precision == "bf16":
        return [f'with torch.autocast("{device}", dtype=torch.bfloat16):  # and no GradScaler', "    ..."]
    if recommendation.precision == "fp32-modules":
        return [
            "# in the forward of what is to stay in FP32:",
            f'with torch.autocast("{device}", enabled=False):',
            "    ...  # on inputs cast with .float()",
        ]
    scalers = meta.get("scalers") or [{}]
    sharded = scalers[0].get("class") == "ShardedGradScaler"
    return [
        f"scaler = {'ShardedGradScaler' if sharded else 'torch.amp.GradScaler'}(",
        f'    "{device}",',
        f"    init_scale={power_of_two(recommendation.init_scale)},",
        f"    growth_factor={recommendation.growth_factor!r},",
        f"    backoff_factor={recommendation.backoff_factor!r},",
        f"    growth_interval={recommendation.growth_interval},",
        ")",
        f"# GradScaler has no min_scale: stop where scaler.get_scale() falls below "
        f"{power_of_two(recommendation.min_scale)}, a lower scale will not help",
    ]


def power_of_two(value: float) -> str:
    """A scale as one writes it in Python: `2.0**14`, or the plain number where it is no power of two."""
    mantissa, exponent = math.frexp(value)
    return f"2.0**{exponent - 1}" if mantissa == 0.5 else repr(float(value))
