"""What one batch at several loss scales says: whether the forward or the backward fails, and which scale is safe."""

from __future__ import annotations

from dataclasses import dataclass

from gradaudit.analysis.checks.base import power


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One forward of the batch and, where it was finite, one backward at a scale.

    Attributes:
        scale: What the loss was multiplied by.
        loss: Its value, unscaled.
        loss_finite: Whether that was finite.
        gradients_finite: Whether all gradients were; None where the forward was not finite and nothing went back.
        has_nan: Whether a gradient held a NaN.
        first_nonfinite: Names of parameters with a non-finite gradient, in the order in which backward reached them.
        amax: Largest finite gradient magnitude, unscaled.
        num_gradients: Parameters that got a gradient.
        num_zero: Those of them whose gradient was zero throughout.
    """

    scale: float
    loss: float
    loss_finite: bool
    gradients_finite: bool | None
    has_nan: bool
    first_nonfinite: tuple[str, ...]
    amax: float | None
    num_gradients: int
    num_zero: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What `Audit.probe` found.

    Attributes:
        forward_finite: Whether the loss was finite; no scale matters where it was not.
        gradients_finite: Whether the gradients were finite at every scale tried.
        largest_safe_scale: Largest scale tried with finite gradients, below every one without; None if there is none.
        smallest_scale: Smallest scale tried.
        scale_in_force: The GradScaler's, None where there is not exactly one.
        first_bad: A sentence on the first non-finite value of the forward and where it was made, if that is known.
        rows: One per scale, ascending.
        verdict: One sentence.
    """

    forward_finite: bool
    gradients_finite: bool
    largest_safe_scale: float | None
    smallest_scale: float
    scale_in_force: float | None
    first_bad: str | None
    rows: tuple[ProbeRow, ...]
    verdict: str


def conclude(rows: tuple[ProbeRow, ...], *, scale_in_force: float | None, first_bad: str | None) -> ProbeResult:
    """The result of a probe.

    Args:
        rows: At least one, by scale.
        scale_in_force: The GradScaler's.
        first_bad: Where the forward went wrong.
    """
    forward_finite = all(row.loss_finite for row in rows)
    bad = [row for row in rows if row.gradients_finite is False]
    safe = [row.scale for row in rows if row.gradients_finite and (not bad or row.scale < bad[0].scale)]
    largest = safe[-1] if safe else None
    if not forward_finite:
        verdict = "The forward is not finite: no scale can help"
        verdict += f"; first bad value: {first_bad.rstrip('.')}." if first_bad else "."
    elif largest is None:
        verdict = _hopeless(rows, bad[0])
    elif not bad:
        verdict = (
            f"The forward is finite, and so is the backward up to {power(largest)}, the largest scale tried: "
            "this batch does not overflow."
        )
    else:
        verdict = _edge(largest, bad[0], scale_in_force)
    return ProbeResult(
        forward_finite, forward_finite and not bad, largest, rows[0].scale, scale_in_force, first_bad, rows, verdict
    )


def _hopeless(rows: tuple[ProbeRow, ...], first: ProbeRow) -> str:
    what = "NaN" if first.has_nan else "infinite"
    span = f"from {power(rows[0].scale)} to {power(rows[-1].scale)}" if len(rows) > 1 else power(first.scale)
    return (
        f"The forward is finite and the gradient is {what} at every scale tried, {span}: no scale can help; backward "
        f"meets it first at {first.first_nonfinite[0]}."
    )


def _edge(largest: float, bad: ProbeRow, in_force: float | None) -> str:
    start = f"The forward is finite and the backward overflows above {power(largest)}"
    where = f", first in the gradient of {bad.first_nonfinite[0]}"
    if in_force is not None and in_force <= largest:
        return f"{start}{where}; the scale in force, {power(in_force)}, is safe for this batch."
    if largest < 1:
        return (
            f"{start}{where}: only a scale below 1 is safe; averaging the loss instead of summing it makes room for "
            "a larger one."
        )
    return f"{start}{where}: a smaller scale is the cure."
