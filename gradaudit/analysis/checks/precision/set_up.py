"""Findings of the group "Precision set-up": whether mixed precision is on, where, and with what it meets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradaudit.analysis.checks.base import NUM_NAMED, Check, Facts, Outcome, Skipped, power
from gradaudit.analysis.checks.calls.call_places import span
from gradaudit.analysis.checks.precision.half_norm import gradient_norm_overflow
from gradaudit.analysis.checks.precision.half_weights import (
    half_trainable_params,
    optimizer_eps_flushed,
    swallowed_updates,
)
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.formats import FP16_DTYPES
from gradaudit.store.tables import Steps

Entry = dict[str, Any]

HALVES = ("float16", "bfloat16")

COMPUTED = ("output", "output_grad", "op_grad")
"""Kinds of tensors that show what precision a model ran in; parameters and their gradients stay FP32 under autocast."""


def _entries(facts: Facts, table: str) -> list[Entry]:
    return list(facts.analysis.run.meta.get(table) or [])


def _made_at(entry: Entry, name: str) -> Place:
    return Place("call_site", name, entry.get("file"), entry.get("line"))


def _whole_run(facts: Facts) -> tuple[int, int]:
    step = facts.analysis.steps.step
    return span(facts, (int(step[0]), int(step[-1])) if len(step) else (0, 0))


def _scaler_without_fp16(facts: Facts) -> Outcome:
    steps, tensors = facts.analysis.steps, facts.analysis.tensors
    handled = set(np.unique(steps.scaler[steps.scaler >= 0]).tolist())
    scalers = [entry for entry in _entries(facts, "scalers") if entry["enabled"] and entry["id"] in handled]
    if not scalers:
        return Skipped("no enabled GradScaler handled a step")
    entered = [entry for entry in _entries(facts, "autocast") if entry["enabled"] or entry.get("requested")]
    seen = {info.dtype for info in tensors} | {row.dtype for row in facts.ops} | {entry["dtype"] for entry in entered}
    for entry in _entries(facts, "optimizers"):
        seen.update(entry.get("param_dtypes") or ())
    if seen & FP16_DTYPES:
        return []
    if not any(info.kind in COMPUTED for info in tensors):
        return Skipped("no tensor was sampled")
    if _entries(facts, "hidden_modules") and not entered:
        return Skipped("what ran in compiled modules was not seen")
    ran = "bfloat16" if "bfloat16" in seen else "float32"
    why = (
        "bfloat16 has the range of FP32, so that nothing overflows or flushes that a scale could save"
        if ran == "bfloat16"
        else "FP32 needs no loss scaling"
    )
    num = int((steps.scaler >= 0).sum())
    return [
        Finding(
            id="scaler-without-fp16",
            severity="warning",
            confidence="high",
            title=f"A GradScaler is on and nothing runs in FP16, only in {ran}",
            summary=(
                f"The scaler handled {num} steps, and every tensor seen was {ran}{' or float32' * (ran != 'float32')}: "
                f"{why}. It costs time, and skips steps for gradients that are inf for another reason."
            ),
            scale_can_fix="no",
            where=(
                *dict.fromkeys(_made_at(entry, str(entry.get("class", "GradScaler"))) for entry in scalers),
                *dict.fromkeys(_made_at(entry, f"autocast({entry['dtype']})") for entry in entered),
            ),
            steps=_whole_run(facts),
            evidence=(Evidence("num_steps", num, "steps with an enabled scaler"),),
            remedy=(
                "Drop the scaler, or make it with enabled=False. If FP16 was meant, run forward and loss under "
                "torch.autocast(device_type, dtype=torch.float16)."
            ),
        )
    ]


def _autocast_inactive(facts: Facts) -> Outcome:
    autocasts, scalers = _entries(facts, "autocast"), _entries(facts, "scalers")
    if not autocasts and not scalers:
        return Skipped("neither autocast nor a GradScaler was used")
    regions, devices = _elsewhere(facts, autocasts), _devices(facts)
    used = {event["scaler"] for event in facts.events if event["name"].startswith("scaler.")}
    off = [entry for entry in scalers if entry.get("requested") and not entry["enabled"] and entry["id"] in used]
    meant = [entry["dtype"] for entry in autocasts if entry["enabled"] or entry.get("requested")]
    if meant and not FP16_DTYPES & set(meant):
        off = []  # bfloat16 needs none
    return [_inactive_finding(facts, regions, off, devices)] if regions or off else []


def _devices(facts: Facts) -> list[str]:
    found = (device for entry in _entries(facts, "optimizers") for device in entry.get("param_devices") or ())
    return list(dict.fromkeys(found))


def _elsewhere(facts: Facts, autocasts: Sequence[Entry]) -> list[Entry]:
    """Regions that were to be on and had no effect; none where one is on where the parameters are."""
    devices = _devices(facts)
    if not devices or any(entry["enabled"] and entry["device"] in devices for entry in autocasts):
        return []
    return [
        entry
        for entry in autocasts
        if (entry["enabled"] or entry.get("requested"))
        and entry["dtype"] in HALVES
        and (entry["device"] not in devices or not entry["enabled"])
    ]


def _inactive_finding(facts: Facts, regions: Sequence[Entry], off: Sequence[Entry], devices: Sequence[str]) -> Finding:
    model, said = " and ".join(devices) or "another device", []
    if regions:
        names = ", ".join(dict.fromkeys(f'autocast("{entry["device"]}")' for entry in regions))
        reason = "" if any(entry["enabled"] for entry in regions) else ", and torch turned it off"
        said.append(f"{names} does nothing for a model on {model}{reason}: it runs in the dtype of its weights.")
    if off:
        name, device = str(off[0].get("class", "GradScaler")), off[0].get("device") or "cuda"
        said.append(
            f"{name} was made for {device}, which is not there, and torch turned it off: losses are not scaled."
        )
    what = " and ".join(word for word, is_so in (("Autocast", regions), ("the GradScaler", off)) if is_so)
    return Finding(
        id="autocast-inactive",
        severity="warning",
        confidence="high",
        title=f"{what[:1].upper()}{what[1:]} {'are' if regions and off else 'is'} off without a word in the script",
        summary=" ".join(said),
        scale_can_fix="no",
        where=(
            *dict.fromkeys(_made_at(entry, "autocast") for entry in regions),
            *dict.fromkeys(_made_at(entry, str(entry.get("class", "GradScaler"))) for entry in off),
        ),
        steps=_whole_run(facts),
        evidence=(
            *(Evidence("autocast_device", str(entry["device"])) for entry in regions),
            *(Evidence("scaler_device", str(entry.get("device"))) for entry in off[:1]),
            *([Evidence("model_device", model)] if devices else []),
        ),
        remedy=(
            f'Give both the device that the model is on: torch.autocast("{devices[0] if devices else "cpu"}", '
            f'dtype=torch.float16) and torch.amp.GradScaler("{devices[0] if devices else "cpu"}"). Where FP32 is '
            "meant, say enabled=False."
        ),
    )


def _rank_disagreement(facts: Facts) -> Outcome:
    run = facts.analysis.run
    if len(run.ranks) < 2:
        return Skipped("one process")
    if not run.meta.get("distributed"):
        return Skipped("the processes were not joined by torch.distributed")
    first, others = run.ranks[0], run.ranks[1:]
    mine = run.rank_steps(first)
    found = []
    for rank in others:
        steps = run.rank_steps(rank)
        at = _differing(mine, steps)
        if len(at):
            found.append((rank, steps, at))
    if not found:
        return []
    rank, steps, at = min(found, key=lambda entry: int(entry[2][0]))
    return [_disagreement(facts, mine, steps, at, first, rank)]


def _differing(mine: Steps, other: Steps) -> np.ndarray:
    """Indices of steps, the same on both ranks, at which a scaler's scale or its verdict differs."""
    num = min(len(mine), len(other))
    same_turn = (mine.optimizer[:num] == other.optimizer[:num]) & (mine.scaler[:num] >= 0) & (other.scaler[:num] >= 0)
    differs = (mine.scale[:num] != other.scale[:num]) | (mine.skipped[:num] != other.skipped[:num])
    return np.flatnonzero(same_turn & differs)


def _disagreement(facts: Facts, mine: Steps, other: Steps, at: np.ndarray, rank: int, other_rank: int) -> Finding:
    i = int(at[0])
    scales = [float(steps.scale[i]) for steps in (mine, other)]
    words = ["skipped" if steps.skipped[i] else "applied" for steps in (mine, other)]
    if words[0] != words[1]:
        what = f"rank {rank} {words[0]} the step and rank {other_rank} {words[1]} it"
        evidence = (Evidence(f"rank_{rank}", words[0]), Evidence(f"rank_{other_rank}", words[1]))
    else:
        what = f"the loss scale is {power(scales[0])} on rank {rank} and {power(scales[1])} on rank {other_rank}"
        evidence = (Evidence(f"scale_rank_{rank}", scales[0]), Evidence(f"scale_rank_{other_rank}", scales[1]))
    return Finding(
        id="rank-disagreement",
        severity="error",
        confidence="high",
        title="The ranks disagree about the loss scale or about a step",
        summary=(
            f"At step {int(mine.step[i])} {what}, and they differ at {len(at)} of {min(len(mine), len(other))} steps. "
            "A step that one rank skips and another applies gives them different weights, for good."
        ),
        scale_can_fix="no",
        where=(Place("rank", str(rank)), Place("rank", str(other_rank)), Place("step", str(int(mine.step[i])))),
        steps=(int(mine.step[i]), int(mine.step[int(at[-1])])),
        evidence=(*evidence, Evidence("num_steps", len(at), "steps at which they differ", 0)),
        remedy=(
            "Let every rank see the same gradients before the scaler looks at them: reduce them first (DDP does), or "
            "use the scaler of the wrapper (torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler), which "
            "reduces found_inf. Load the same scaler state on every rank."
        ),
    )


def _compiled_blind_spot(facts: Facts) -> Outcome:
    hidden = _entries(facts, "hidden_modules")
    if not hidden:
        return []
    shown = [(_as_written(str(entry["name"])), entry["kind"]) for entry in hidden[:NUM_NAMED]]
    names = ", ".join(f"{name} ({kind})" for name, kind in shown)
    more = f" and {len(hidden) - NUM_NAMED} more" if len(hidden) > NUM_NAMED else ""
    return [
        Finding(
            id="compiled-blind-spot",
            severity="info",
            confidence="high",
            title="Compiled or scripted modules hide what happens inside",
            summary=(
                f"Seen from outside only: {names}{more}. Their outputs, the gradients at their borders and of their "
                "parameters are on record; values that overflow inside and the lines that make them are not."
            ),
            scale_can_fix="no",
            where=tuple(Place("module", name) for name, _ in shown),
            steps=_whole_run(facts),
            evidence=(Evidence("num_hidden", len(hidden), "modules"),),
            remedy=(
                "To look inside, run a few steps without torch.compile. Compiled kernels keep more in FP32 between "
                "operations than eager ones, so that an overflow may come or go."
            ),
        )
    ]


def _as_written(name: str) -> str:
    """A compiled module's name as the script has it: torch puts the original one level down."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") or "the model"


PRECISION: tuple[Check, ...] = (
    Check("half-trainable-params", half_trainable_params),
    Check("swallowed-updates", swallowed_updates),
    Check("optimizer-eps-flushed", optimizer_eps_flushed),
    Check("gradient-norm-overflow", gradient_norm_overflow),
    Check("scaler-without-fp16", _scaler_without_fp16),
    Check("autocast-inactive", _autocast_inactive),
    Check("rank-disagreement", _rank_disagreement),
    Check("compiled-blind-spot", _compiled_blind_spot),
)
