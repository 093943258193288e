from __future__ import annotations

from typing import Any

import pytest

from gradaudit_dashboard import state
from gradaudit_dashboard.state import Pin, Route, View

ODD: list[Any] = [None, 1, -1, 1e308, float("nan"), "x", "", [], [1], {}, {"a": {}}, True, "\x00", "x" * 10_000, b"x"]


@pytest.mark.parametrize(
    ("pathname", "expected"),
    [
        ("/", Route("runs")),
        ("", Route("runs")),
        (None, Route("runs")),
        ("/r/a", Route("overview", "a")),
        ("/r/a/", Route("overview", "a")),
        ("/r/exp%2Fa%20b", Route("overview", "exp/a b")),
        ("/r/a/b/c", Route("missing")),
        ("/r", Route("missing")),
        ("/elsewhere", Route("missing")),
    ],
)
def test_an_address_means_one_page(pathname: Any, expected: Route) -> None:
    assert state.route(pathname) == expected


@pytest.mark.parametrize("name", ["a", "exp/run 1", "50%", "#?&", "\u00e4"])
def test_a_link_to_a_run_leads_back_to_its_name(name: str) -> None:
    assert state.route(state.run_href(name)) == Route("overview", name)


@pytest.mark.parametrize("value", ODD)
def test_odd_values_become_the_default_or_a_short_text(value: Any) -> None:
    view = state.view({"sort": value, "metric": value, "q": value})
    pin = state.pin({"layer": value, "from": value, "to": value})

    assert (view.sort, view.metric) == ("worst", "sqnr")
    assert len(view.q) <= state.MAX_TEXT
    assert pin.layer is None or len(pin.layer) <= state.MAX_TEXT
    assert pin.steps in (None, (1, 1))
    assert state.view(value) == View()
    assert state.pin(value) == Pin()
    assert state.columns(value) == state.COLUMNS["medium"]


def test_known_values_are_taken() -> None:
    assert state.view({"sort": "model", "metric": "zero", "q": "fc"}) == View("model", "zero", "fc")
    assert state.pin({"layer": "a", "from": 9, "to": 3}) == Pin("a", (3, 9))
    assert state.pin({"to": 3}) == Pin(None, (3, 3))
    assert state.columns("wide") == 900
