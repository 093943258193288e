from __future__ import annotations

from dataclasses import replace

import pytest

from gradaudit.analysis.compare import compare
from tests.unit.reporters import reports
from tests.unit.reporters.reports import layer


def test_layers_are_matched_by_name_kind_and_operation_and_in_order_where_several_share_them() -> None:
    def op(sqnr_db: float, tensor: int, name: str = "MulBackward0"):  # type: ignore[no-untyped-def]
        return layer("attn", sqnr_db, tensor=tensor, kind="op_grad", op=name)

    a = reports.healthy(layers=(op(20.0, 4), op(10.0, 3), op(60.0, 5, "AddBackward0")))
    b = reports.healthy(layers=(op(11.0, 0), op(25.0, 1)))
    comparison = compare(a, b)

    assert [(change.sqnr_db_a, change.sqnr_db_b) for change in comparison.layers] == [(20.0, 25.0), (10.0, 11.0)]
    assert (comparison.num_layers_only_a, comparison.num_layers_only_b) == (1, 0)


def test_a_layer_without_sqnr_on_either_side_has_no_change() -> None:
    a = reports.healthy(layers=(layer("a", None), layer("b", float("inf"), tensor=1), layer("c", 3.0, tensor=2)))
    b = reports.healthy(layers=(layer("a", 3.0), layer("b", 3.0, tensor=1), layer("c", float("nan"), tensor=2)))

    assert compare(a, b).layers == ()


def test_a_finding_is_new_fixed_or_the_same_by_its_id_at_its_worst() -> None:
    warning, error = reports.finding(id="x", severity="warning"), reports.finding(id="x", severity="error")
    a = reports.healthy(findings=(warning, error, reports.finding(id="gone")))
    b = reports.healthy(findings=(warning, reports.finding(id="came")))

    assert [(change.id, change.status, change.severity_a, change.severity_b) for change in compare(a, b).findings] == [
        ("came", "new", None, "error"),
        ("gone", "fixed", "error", None),
        ("x", "same", "error", "warning"),
    ]


def test_the_scale_range_is_that_of_the_whole_run() -> None:
    side = compare(reports.underflow(), reports.no_scaler()).a

    assert (side.scale_min, side.scale_max) == (4.0, 64.0)
    assert side.skip_rate == pytest.approx(0.01)


def test_runs_without_steps_or_scaler_compare_too() -> None:
    comparison = compare(reports.no_steps(), reports.no_scaler())

    assert comparison.a.skip_rate == 0.0
    assert comparison.a.scale_min is None
    assert comparison.b.min_sqnr_db is None
    assert comparison.to_dict()["format"] == "gradaudit-comparison"


def test_comparing_in_the_other_order_turns_every_sign() -> None:
    a = reports.underflow()
    b = replace(a, layers=tuple(replace(row, sqnr_db=row.sqnr_db + row.tensor) for row in a.layers))

    there, back = compare(a, b).layers, compare(b, a).layers
    assert [change.change_db for change in there] == [-change.change_db for change in back]
