"""Weights that are not FP32: trained without an FP32 copy, updates that round to nothing, an eps that is zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaudit.analysis.checks.base import NUM_NAMED, Facts, Outcome, Skipped, percent
from gradaudit.analysis.checks.calls.call_places import site, span, where_is
from gradaudit.analysis.origin import clean_steps
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.formats import BF16, FP16, FP16_DTYPES
from gradaudit.store.tables import NO_GRADIENT, Samples, TensorInfo

Entry = dict[str, Any]

REFUSED = "Attempting to unscale FP16 gradients"
"""torch's words for half gradients in GradScaler.unscale_."""

SWALLOWED_SHARE = 0.2
"""Were updates normally distributed, one in five lost means that they spread over two spacings of the weights, and
rounding adds an error of 14 %; with fewer lost it is less than that, and batch noise is more."""

MOSTLY_SWALLOWED = 0.5
"""More is lost than arrives."""

MIN_UPDATES = 64
"""Updates of one parameter, over all sampled steps, of which a share says something."""

COMPENSATES = ("compensation", "kahan")
"""Optimizers with such a state carry what was rounded away over to the next step."""

EPS_STOP_GAP = 1e-4
"""The smallest power of ten that is a normal number in FP16."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """An optimizer and those of its parameters that are concerned."""

    entry: Entry
    params: tuple[TensorInfo, ...]


def optimizer_place(entry: Entry) -> Place:
    """An optimizer with the line that made it, where that was seen."""
    return Place("optimizer", str(entry["class"]), entry.get("file"), entry.get("line"))


def half_trainable_params(facts: Facts) -> Outcome:
    """Trainable parameters in FP16 of an optimizer that keeps no FP32 copy of them."""
    entries = facts.analysis.run.meta.get("optimizers", [])
    if not any(entry.get("param_dtypes") for entry in entries):
        return Skipped("no optimizer was used")
    refused = [event for event in facts.events if REFUSED in (event["raised"] or "")]
    stopped = {event["optimizer"] for event in refused}
    owners = [
        _Owner(entry, params)
        for entry in entries
        if (params := _half_params(facts, entry)) and (not entry.get("keeps_masters") or entry["id"] in stopped)
    ]
    return [_half_params_finding(facts, owners, refused)] if owners else []


def _half_params(facts: Facts, entry: Entry) -> tuple[TensorInfo, ...]:
    """Parameters of one optimizer that are FP16 and trained: with steps on record, those that ever had a gradient."""
    tensors = facts.analysis.tensors
    rows, amax = facts.analysis.steps.param_matrix(entry["id"])
    had_gradient = (amax != NO_GRADIENT).any(axis=0)
    found = []
    for slot, (tensor, dtype) in enumerate(zip(entry["params"], entry.get("param_dtypes", ()), strict=False)):
        is_trained = not len(rows) or (slot < len(had_gradient) and bool(had_gradient[slot]))
        if dtype in FP16_DTYPES and tensor < len(tensors) and tensors[tensor].trainable and is_trained:
            found.append(tensors[tensor])
    return tuple(found)


def _half_params_finding(facts: Facts, owners: Sequence[_Owner], refused: Sequence[dict[str, Any]]) -> Finding:
    params = [info for owner in owners for info in owner.params]
    num_all = sum(_num_trainable(facts, owner.entry) for owner in owners)
    names = ", ".join(info.fqn for info in params[:NUM_NAMED])
    more = f" and {len(params) - NUM_NAMED} more" if len(params) > NUM_NAMED else ""
    classes = ", ".join(dict.fromkeys(str(owner.entry["class"]) for owner in owners))
    are = "is" if len(params) == 1 else "are"
    summary = (
        f"{len(params)} of {num_all} trainable parameters of {classes} {are} FP16, and the optimizer keeps no FP32 "
        f"copy: {names}{more}."
    )
    if refused:
        summary += f' For these torch stopped at {where_is(refused[0])} with "{REFUSED}"; it does not say which.'
    else:
        summary += " An update smaller than about 1/4096 to 1/2048 of a weight rounds away, and so does a small eps."
    everything = len(params) == num_all
    return Finding(
        id="half-trainable-params",
        severity="error",
        confidence="high",
        title="FP16 weights are trained without an FP32 copy",
        summary=summary,
        scale_can_fix="no",
        where=(
            *(Place("param", info.fqn) for info in params[:NUM_NAMED]),
            *dict.fromkeys(site(event) for event in refused),
            *(optimizer_place(owner.entry) for owner in owners),
        ),
        steps=_all_steps(facts),
        evidence=(
            Evidence("num_half_params", len(params), f"of {num_all} trainable parameters", 0),
            Evidence("num_half_elements", sum(_numel(info) for info in params), "elements"),
        ),
        remedy=_half_params_remedy(params, everything=everything),
    )


def _half_params_remedy(params: Sequence[TensorInfo], *, everything: bool) -> str:
    if everything:
        first = "Leave out .half() (or dtype=torch.float16) where the model is made or loaded"
    elif len(params) <= NUM_NAMED:
        first = f"Make {', '.join(info.fqn for info in params)} FP32 before the optimizer is made"
    else:
        first = "Make what is trained FP32 before the optimizer is made"
    return (
        f"{first} (for p in model.parameters(): if p.requires_grad: p.data = p.data.float()), and run the forward "
        "under torch.autocast with dtype=torch.float16, which casts where it helps. Frozen parameters may stay in half."
    )


def _num_trainable(facts: Facts, entry: Entry) -> int:
    tensors = facts.analysis.tensors
    return sum(tensors[tensor].trainable for tensor in entry["params"] if tensor < len(tensors))


def _numel(info: TensorInfo) -> int:
    return int(np.prod(info.shape, dtype=np.int64))


def _all_steps(facts: Facts) -> tuple[int, int]:
    step = facts.analysis.steps.step
    return span(facts, (int(step[0]), int(step[-1])) if len(step) else (0, 0))


def swallowed_updates(facts: Facts) -> Outcome:
    """Elements with a gradient whose weight is the same after an applied step."""
    tensors = facts.analysis.tensors
    compensated = {
        tensors[tensor].fqn
        for entry in facts.analysis.run.meta.get("optimizers", [])
        if entry.get("keeps_masters") or any(word in key.lower() for key in _state(entry) for word in COMPENSATES)
        for tensor in entry["params"]
        if tensor < len(tensors)
    }
    ids = [info.id for info in tensors if info.kind == "update" and info.fqn not in compensated]
    if not ids:
        return Skipped("no weight that is not FP32 was seen, or its rounding is made up for")
    rows = facts.analysis.run.samples(tensors=ids)
    clean = clean_steps(facts.analysis.steps)
    steps = facts.analysis.steps
    applied = clean - set(steps.step[steps.skipped.astype(bool)].tolist())
    rows = rows.select(np.isin(rows.step, list(applied)) & (rows.numel > 0))
    if not len(rows):
        return Skipped("no applied step with finite gradients was sampled")
    num, lost = (
        np.bincount(rows.tensor, weights=column, minlength=len(tensors)) for column in (rows.numel, rows.num_zero)
    )
    share = np.divide(lost, num, out=np.zeros(len(tensors)), where=num > 0)
    overall = float(lost.sum() / num.sum())
    hit = [int(i) for i in np.argsort(-share, kind="stable") if share[i] > SWALLOWED_SHARE and num[i] > 0]
    alone = any(share[i] > MOSTLY_SWALLOWED and num[i] >= MIN_UPDATES for i in hit)
    if overall <= SWALLOWED_SHARE and not alone:
        return []
    return [_swallowed_finding(facts, rows, [(tensors[i], float(share[i])) for i in hit], overall)]


def _state(entry: Entry) -> dict[str, str]:
    return dict(entry.get("state_dtypes") or {})


def _swallowed_finding(facts: Facts, rows: Samples, hit: Sequence[tuple[TensorInfo, float]], overall: float) -> Finding:
    dtype = hit[0][0].dtype
    bits = (BF16 if dtype == "bfloat16" else FP16).mantissa_bits
    names = ", ".join(f"{info.fqn} ({percent(share)})" for info, share in hit[:NUM_NAMED])
    owners = [entry for entry in facts.analysis.run.meta.get("optimizers", []) if _owns(facts, entry, hit)]
    rates = list(dict.fromkeys(entry["lr"] for entry in owners if entry.get("lr") is not None))
    at_rate = f" at learning rate {', '.join(f'{rate:g}' for rate in rates)}" if rates else ""
    steps = np.unique(rows.step)
    return Finding(
        id="swallowed-updates",
        severity="error" if overall > MOSTLY_SWALLOWED else "warning",
        confidence="high" if len(steps) > 1 else "medium",
        title="Updates are lost to rounding",
        summary=(
            f"{percent(overall)} of the updates with a gradient changed nothing{at_rate}, at {len(steps)} sampled "
            f"applied step{'s' if len(steps) > 1 else ''}: most in {names}. A {dtype} weight moves by "
            f"1/{2 ** (bits + 1)} to 1/{2**bits} of its size at least, and an update of less than half of it is lost."
        ),
        scale_can_fix="no",
        where=(
            *(Place("param", info.fqn) for info, _ in hit[:NUM_NAMED]),
            *(optimizer_place(entry) for entry in owners),
        ),
        steps=(int(steps[0]), int(steps[-1])),
        evidence=(
            Evidence(
                "swallowed_share", overall, f"of {int(rows.numel.sum())} updates with a gradient", SWALLOWED_SHARE
            ),
            Evidence("swallowed_share_worst", hit[0][1], f"of the updates of {hit[0][0].fqn}", MOSTLY_SWALLOWED),
            Evidence("largest_change", float(rows.amax.max()), "of a weight in one step"),
            Evidence("spacing", 2.0**-bits, "of a weight's size, at most"),
            *(Evidence("lr", float(rate)) for rate in rates),
        ),
        remedy=(
            "Keep the weights in FP32 and run the forward under torch.autocast; or use an optimizer that keeps FP32 "
            "master weights or carries the rounding error over (Kahan summation)."
        ),
    )


def _owns(facts: Facts, entry: Entry, hit: Sequence[tuple[TensorInfo, float]]) -> bool:
    tensors = facts.analysis.tensors
    held = {tensors[tensor].fqn for tensor in entry["params"] if tensor < len(tensors)}
    return any(info.fqn in held for info, _ in hit)


def optimizer_eps_flushed(facts: Facts) -> Outcome:
    """An eps that is zero in the FP16 state it is added to."""
    entries = [entry for entry in facts.analysis.run.meta.get("optimizers", []) if _state(entry)]
    if not entries:
        return Skipped("no optimizer keeps a state of its parameters' shape, or none was read")
    flushed = [entry for entry in entries if is_eps_flushed(entry)]
    return [_eps_finding(facts, flushed)] if flushed else []


def is_eps_flushed(entry: Entry) -> bool:
    """Whether an optimizer's eps is zero in the dtype of its state."""
    eps = entry.get("eps")
    return eps is not None and eps <= 2.0**FP16.flush_log2 and bool(FP16_DTYPES & set(_state(entry).values()))


def _eps_finding(facts: Facts, entries: Sequence[Entry]) -> Finding:
    entry = entries[0]
    keys = ", ".join(key for key, dtype in _state(entry).items() if dtype in FP16_DTYPES)
    return Finding(
        id="optimizer-eps-flushed",
        severity="error",
        confidence="high",
        title=f"The eps of {entry['class']} is 0 in FP16",
        summary=(
            f"{entry['class']} divides by the root of a second moment plus eps = {entry['eps']:g}, and its state "
            f"({keys}) is FP16: there whatever is at most 2^{FP16.flush_log2} = 3e-08 is 0. The square of a gradient "
            "below 1.7e-04 is 0 as well, and such elements are divided by zero."
        ),
        scale_can_fix="no",
        where=tuple(optimizer_place(found) for found in entries),
        steps=_all_steps(facts),
        evidence=(Evidence("eps", float(entry["eps"]), "", 2.0**FP16.flush_log2),),
        remedy=(
            f"Keep the weights in FP32: then the optimizer's state is too. As a stop-gap, eps={EPS_STOP_GAP:g}; the "
            "second moment stays as coarse as it is."
        ),
    )
