"""What a check gets and what it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaudit.analysis.context import Analysis
from gradaudit.analysis.observations import Calls
from gradaudit.analysis.origin import Origin
from gradaudit.analysis.report import Finding, Place
from gradaudit.analysis.windows import Windows
from gradaudit.store.tables import OpRow, TensorInfo

NUM_NAMED = 5
"""Places named in a finding; the layers table has them all."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything known of a run: its analysis and safe windows.

    `unexplained` are, per history, the updates whose overflow no finite gradient explains (see overflows); `events` the
    call-order log; `ops` the operations of the traced forwards; `calls` what the log amounts to, and
    `origins` where non-finite values of these forwards were born, both worked out at first use.
    """

    analysis: Analysis
    windows: Windows
    unexplained: tuple[np.ndarray, ...]
    events: tuple[dict[str, Any], ...] = ()
    ops: tuple[OpRow, ...] = ()
    calls: Callable[[], Calls] = Calls
    origins: Callable[[], tuple[Origin, ...]] = tuple


@dataclass(frozen=True, slots=True)
class Skipped:
    """A check that has nothing to look at, and why."""

    reason: str


NO_SCALER = Skipped("no enabled GradScaler was used")

NO_FP16 = Skipped("nothing ran in FP16")

Outcome = Sequence[Finding] | Skipped


@dataclass(frozen=True, slots=True)
class Check:
    """One id and the function that looks for it."""

    id: str
    look: Callable[[Facts], Outcome]


def power(scale: float) -> str:
    """A scale as people write it: 2^16, or the number itself."""
    if scale > 0 and math.log2(scale).is_integer():
        return f"2^{int(math.log2(scale))}"
    return f"{scale:.6g}"


def percent(share: float) -> str:
    """A share with three significant digits: 29.2 %."""
    return f"{100 * share:.3g} %"


def place_of(info: TensorInfo) -> Place:
    """A tensor as a place: parameter, module or operation."""
    if info.kind == "param_grad" or info.fqn.rpartition(".")[2] in ("weight", "bias"):
        return Place("param", info.fqn)
    return Place("module" if info.kind == "output_grad" else "op", info.label)
