"""The heatmap's colours: greys where there is no value, nothing where all is fine, then a ramp per theme."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradaudit_dashboard.heat import FINE, METRIC_TABLE, NO_VALUE, NOT_SAMPLED, WORST

RAMPS = {
    "light": ("#fbe3cd", "#f6a96b", "#d55e00", "#7f1d06"),
    "dark": ("#46301f", "#9c4a12", "#f0832a", "#ffe3b8"),
}
"""Fine to worst; towards dark on a light page and towards light on a dark one, so that the worst always stands out."""

NOT_SAMPLED_COLOUR = "rgba(128,128,128,0.45)"
NO_VALUE_COLOUR = "rgba(128,128,128,0.16)"


def ramp_colour(theme: str, position: float) -> str:
    """The heatmap's colour at a place from 0 (just noticed) to 1 (worst)."""
    stops = [tuple(int(stop[i : i + 2], 16) for i in (1, 3, 5)) for stop in RAMPS[theme]]
    place = min(max(position, 0.0), 1.0) * (len(stops) - 1)
    left = min(int(place), len(stops) - 2)
    mixed = (round(a + (b - a) * (place - left)) for a, b in zip(stops[left], stops[left + 1], strict=True))
    return f"rgb({','.join(str(channel) for channel in mixed)})"


def colourscale(metric: str, theme: str) -> list[list[Any]]:
    """Plotly colour scale over the codes 0 to 255: greys for no data, nothing where fine, then the ramp."""
    clear = "rgba(0,0,0,0)"
    scale: list[list[Any]] = []
    for code, colour in ((NOT_SAMPLED, NOT_SAMPLED_COLOUR), (NO_VALUE, NO_VALUE_COLOUR), (FINE, clear)):
        scale += [[max(code - 0.5, 0) / WORST, colour], [(code + 0.5) / WORST, colour]]
    levels = np.unique(np.append(np.arange(FINE + 1, WORST, 12), WORST))
    ramp = METRIC_TABLE[metric].ramp(levels)
    scale.append([(FINE + 0.5) / WORST, ramp_colour(theme, float(ramp[0]))])
    scale += [[int(level) / WORST, ramp_colour(theme, float(at))] for level, at in zip(levels, ramp, strict=True)]
    return scale
