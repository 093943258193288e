from __future__ import annotations

import pytest

from gradaudit_dashboard.components import legend
from gradaudit_dashboard.heat import METRIC_TABLE


@pytest.mark.parametrize("metric", METRIC_TABLE)
def test_the_legend_names_both_kinds_of_missing_data_and_has_a_ramp_per_theme(metric: str) -> None:
    shown = str(legend(metric, 40.0))

    assert "not sampled" in shown
    assert METRIC_TABLE[metric].no_value in shown
    assert "ramp light" in shown
    assert "ramp dark" in shown
