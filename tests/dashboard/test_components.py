from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
from gradaudit_dashboard.components import legend, scaler_code
from gradaudit_dashboard.heat import METRIC_TABLE

from gradaudit.analysis.report import Outlook, Recommendation, Window
from tests import factory

ADVICE = Recommendation(
    True, "fp16", 2.0**14, 500, 2.0, 0.5, 1.0, Window(8, 15, "a", "b"), Outlook(1, 0.1, 47.0), Outlook(4, 0.4, 12.0), ()
)


@pytest.mark.parametrize(
    ("advice", "meta", "expected"),
    [
        (ADVICE, factory.meta(), "scaler = torch.amp.GradScaler('cpu', init_scale=2.0 ** 14"),
        (ADVICE, {}, "scaler = torch.amp.GradScaler('cuda', init_scale=2.0 ** 14"),
        (replace(ADVICE, init_scale=3000.0), {}, "scaler = torch.amp.GradScaler('cuda', init_scale=3000.0"),
        (replace(ADVICE, init_scale=0.25), {}, "scaler = torch.amp.GradScaler('cuda', init_scale=2.0 ** (-2)"),
        (
            ADVICE,
            {"scalers": [{"class": "ShardedGradScaler"}]},
            "scaler = ShardedGradScaler('cuda', init_scale=2.0 ** 14",
        ),
    ],
)
def test_the_code_to_copy_is_python_with_the_recommended_settings(
    advice: Recommendation, meta: dict[str, Any], expected: str
) -> None:
    line = ast.unparse(ast.parse(scaler_code(advice, meta)))

    assert line.replace("2.0 ** -2", "2.0 ** (-2)").startswith(expected)
    assert line.endswith("growth_factor=2.0, backoff_factor=0.5, growth_interval=500)")


@pytest.mark.parametrize("metric", METRIC_TABLE)
def test_the_legend_names_both_kinds_of_missing_data_and_has_a_ramp_per_theme(metric: str) -> None:
    shown = str(legend(metric, 40.0))

    assert "not sampled" in shown
    assert METRIC_TABLE[metric].no_value in shown
    assert "ramp light" in shown
    assert "ramp dark" in shown
