"""Take a recommendation from where the user has it: a run folder, or a report written with --format json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradaudit.analysis.audit import audit
from gradaudit.analysis.report import REPORT_FORMAT, Outlook, Recommendation, Window
from gradaudit.errors import GradauditError
from gradaudit.store.reader import open_run


def recommendation_from(source: Path) -> Recommendation:
    """Read or compute a recommendation.

    Args:
        source: A run folder, or a JSON report.

    Raises:
        GradauditError: It is neither, or it holds no recommendation.
    """
    if source.is_dir() or not source.exists():
        found = audit(open_run(source)).recommendation
    else:
        found = _from_report(source)
    if found is None:
        raise GradauditError(f"{source} holds no recommendation to apply: nothing of that run was in FP16.")
    return found


def _from_report(path: Path) -> Recommendation | None:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GradauditError(
            f"{path} is no JSON report; write one with: gradaudit report RUN --format json."
        ) from error
    if not isinstance(body, dict) or body.get("format") != REPORT_FORMAT:
        raise GradauditError(f"{path} is no gradaudit report; write one with: gradaudit report RUN --format json.")
    row = body.get("recommendation")
    return None if row is None else _recommendation(row, path)


def _recommendation(row: dict[str, Any], path: Path) -> Recommendation:
    try:
        return Recommendation(
            change_needed=bool(row["change_needed"]),
            precision=row["precision"],
            init_scale=float(row["init_scale"]),
            growth_interval=int(row["growth_interval"]),
            growth_factor=float(row["growth_factor"]),
            backoff_factor=float(row["backoff_factor"]),
            min_scale=float(row["min_scale"]),
            window=Window(**row["window"]),
            predicted=Outlook(**row["predicted"]),
            current=Outlook(**row["current"]),
            reasons=tuple(row["reasons"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise GradauditError(
            f"{path} has a recommendation that cannot be read ({error}); write the report again."
        ) from error
