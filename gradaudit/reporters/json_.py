"""The report as versioned JSON (design section 6), for scripts and for the other commands' `--format json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from gradaudit.analysis.report import AuditReport


def render(report: AuditReport) -> str:
    """The report in JSON that any parser takes: non-finite floats are the strings "inf", "-inf" and "nan"."""
    return dumps(report.to_dict())


def dumps(body: Mapping[str, Any]) -> str:
    """Strict JSON of plain data, one key a line; ends with a line break."""
    return json.dumps(_strict(body), allow_nan=False, indent=1) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
