"""The one colour per zone, shared by the HTML report and the dashboard.

From Okabe and Ito's and Tol's palettes, told apart with any colour vision; a zone is never shown by colour alone.
"""

from __future__ import annotations

ZONE_COLOURS = {
    "zero": "#999999",
    "flushed": "#D55E00",
    "subnormal": "#E69F00",
    "normal": "#0072B2",
    "near_max": "#CC79A7",
    "overflow": "#AA4499",
    "nan": "#000000",
}
"""Fill per zone, in the order of analysis.zones.ZONES."""

NAN_OUTLINE = "#FFFFFF"
"""NaN is black with a white outline, so that it stands out on a dark page as well."""
