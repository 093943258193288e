"""The report as versioned JSON (design section 6), for scripts and for the other commands' `--format json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gradaudit.analysis.report import AuditReport, plain


def render(report: AuditReport) -> str:
    """The report in JSON that any parser takes: non-finite floats are the strings "inf", "-inf" and "nan"."""
    return dumps(report.to_dict())


def dumps(body: Mapping[str, Any]) -> str:
    """Strict JSON of plain data, one key a line; ends with a line break."""
    return json.dumps(plain(dict(body)), allow_nan=False, indent=1) + "\n"
