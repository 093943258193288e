"""A script that stopped at a step of which only the forward is on record: what is known of that one."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.checks.base import Facts
from gradaudit.analysis.checks.calls.call_places import detail
from gradaudit.analysis.report import Evidence, Finding, Place

COMPLAINT = re.compile(r"(?i)\b(nan|inf|infinite|infinity|finite|non-?finite|not finite|diverged|exploded)s?\b")
"""In the message of the exception that ended a script: it looked at the numbers itself."""

STOPS = frozenset(["AssertionError", "SystemExit", "FloatingPointError"])
"""Exceptions by which a script stops itself; any other one may have nothing to do with an inf in an output."""

RECORD_MORE = (
    "Record again with --origin always: it traces every step, also the one that the script stops at, and names the "
    "operation and its line."
)


@dataclass(frozen=True, slots=True)
class _Last:
    """The step, what was finite of it (None: not known), the exception that ended the script, and its line."""

    step: int
    module: str
    inputs: bool | None
    outputs: bool
    has_nan: bool
    losses: bool | None
    exception: str | None
    places: tuple[Place, ...]


def stopped_at(facts: Facts) -> list[Finding]:
    """A step that never closed, whose output or loss was not finite, after steps that were."""
    last = _last(facts)
    if last is None or last.inputs is False:
        return []
    complains = COMPLAINT.search(last.exception or "") is not None
    bad_output = last.has_nan or (not last.outputs and stopped_itself(facts))
    if not bad_output and last.losses is not False and not complains:
        return []
    if bad_output:
        known = f"the output of {last.module} was not finite"
    elif last.losses is False:
        known = f"the output of {last.module} was finite and the loss was not: what lies between them made it"
    else:
        known = f"the output of {last.module} was finite, so what was computed from it is what the script rejected"
    batch = "its batch was finite, " if last.inputs else ""
    return [
        Finding(
            id="unlocated-nonfinite",
            severity="warning",
            confidence="medium",
            title="The script stopped at a step that was not finite",
            summary=f"Step {last.step} never reached its optimizer{_ended(last)}: {batch}{known}. The steps before it "
            "were finite, so no forward had been traced.",
            scale_can_fix="no",
            where=last.places,
            steps=(last.step, last.step),
            evidence=(Evidence("num_steps", len(facts.analysis.steps), "steps before it"),),
            remedy=RECORD_MORE,
        )
    ]


def stopped_by_input(facts: Facts) -> list[Finding]:
    """The same where the model was given numbers that were not finite."""
    last = _last(facts)
    if last is None or last.inputs is not False or (last.outputs and last.losses is not False):
        return []
    return [
        Finding(
            id="nonfinite-input",
            severity="error",
            confidence="medium",
            title="The batch itself holds NaN or inf",
            summary=f"At step {last.step}, which never reached its optimizer{_ended(last)}, the inputs of the model "
            "were not finite, and neither was its output. At no step before it were they. Precision has nothing to do "
            "with it: FP32 gives NaN as well.",
            scale_can_fix="no",
            where=last.places,
            steps=(last.step, last.step),
            evidence=(Evidence("num_steps", 1, f"of {len(facts.analysis.steps) + 1} steps", 0),),
            remedy="Look at the data of that step (--save-batch keeps it): drop or repair such samples where they are "
            "loaded, with torch.isfinite(x).all() as the test.",
        )
    ]


def stopped_itself(facts: Facts) -> bool:
    """Whether the script ended in an exception that looks like its own verdict on the numbers.

    Without that an inf in the last output may be a mask: of -inf, made on purpose, in a forward that is no training.
    """
    error = facts.analysis.run.meta.get("exception") or {"type": "", "message": ""}
    return error["type"] in STOPS or COMPLAINT.search(error["message"]) is not None


def _ended(last: _Last) -> str:
    return f" ({last.exception})" if last.exception else ""


def _last(facts: Facts) -> _Last | None:
    """The step that never closed, if those before it were clean."""
    steps, meta = facts.analysis.steps, facts.analysis.run.meta
    event = next((e for e in reversed(facts.events) if e["name"] == "step.unfinished"), None)
    if event is None:
        return None
    broken = any(ids is not None and len(ids) for ids in steps.weights_nonfinite)
    if broken or (len(steps) and bool(np.any(steps.loss_finite[-1:] == 0))):
        return None  # an echo of what came before
    seen = detail(event)
    error = meta.get("exception") or {}
    text = f"{error['type']}: {error['message']}".removesuffix(": ") if error else None
    line = (Place("call_site", error["type"], error["file"], error["line"]),) if error.get("file") else ()
    return _Last(
        step=int(event["step"]),
        module=seen["module"],
        inputs=seen["inputs_finite"],
        outputs=seen["outputs_finite"] is not False,
        has_nan=bool(seen["outputs_nan"]),
        losses=seen["losses_finite"],
        exception=text,
        places=(*line, Place("step", str(event["step"]))),
    )
