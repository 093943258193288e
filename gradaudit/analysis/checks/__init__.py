"""Every check, in the order in which it runs and is listed.

A check is a function from what is known of a run to findings, or to a `Skipped` with the reason. Adding one: write it
in the file of its group, add it to that file's tuple, a section to docs/findings.md, and two tests: a real run that
produces it and the nearest healthy one that does not.
"""

from gradaudit.analysis.checks.base import Check, Facts, Skipped
from gradaudit.analysis.checks.calls.order_of_calls import ORDER_OF_CALLS
from gradaudit.analysis.checks.forward.forward_values import FORWARD_VALUES
from gradaudit.analysis.checks.forward.integrity import INTEGRITY
from gradaudit.analysis.checks.gradients.gradient_zones import GRADIENT_ZONES
from gradaudit.analysis.checks.precision.set_up import PRECISION
from gradaudit.analysis.checks.scale.loss_scale import LOSS_SCALE

CHECKS: tuple[Check, ...] = (
    *LOSS_SCALE,
    *GRADIENT_ZONES,
    *FORWARD_VALUES,
    *INTEGRITY,
    *ORDER_OF_CALLS,
    *PRECISION,
)

__all__ = ["CHECKS", "Check", "Facts", "Skipped"]
