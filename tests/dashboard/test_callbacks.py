from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dash import no_update
from dash._utils import to_json

from gradaudit_dashboard import callbacks
from gradaudit_dashboard.app import create_app
from gradaudit_dashboard.layout import page
from gradaudit_dashboard.source import Source
from gradaudit_dashboard.state import Route
from tests.dashboard import runs
from tests.dashboard.test_state import ODD

SHAPES: list[Callable[[Path], Path]] = [
    runs.healthy, runs.underflowing, runs.empty, runs.one_step, runs.all_nan, runs.all_zero, runs.hostile,
]  # fmt: skip
WIDE = "wide"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    root = tmp_path_factory.mktemp("runs")
    for make in (*SHAPES, runs.torn, runs.broken):
        make(root / make.__name__)
    return Source(root)


def strict(value: Any) -> str:
    """What the browser gets, as readable JSON; fails on NaN and Infinity, which are not JSON."""
    return json.dumps(json.loads(to_json(value), parse_constant=lambda name: pytest.fail(f"{name} in JSON")))


def version(source: Source, run: str) -> str:
    return source.load(run).key


@pytest.mark.parametrize("make", SHAPES)
def test_every_panel_of_every_shape_of_run_is_shown_without_an_error_card(
    source: Source, make: Callable[[Path], Path]
) -> None:
    run = make.__name__
    shown = strict(
        [
            page(source, Route("overview", run)),
            callbacks.show_summary(source, version(source, run), run),
            callbacks.show_timeline(source, version(source, run), {}, WIDE, run),
            callbacks.show_layer(source, version(source, run), {}, {}, run),
        ]
    )

    assert "could not be shown" not in shown


@pytest.mark.parametrize("value", ODD)
def test_hostile_inputs_change_nothing_and_break_nothing(source: Source, value: Any) -> None:
    key = version(source, "healthy")
    odd = dict.fromkeys(("sort", "metric", "q", "layer", "from", "to"), value)

    for data in (value, odd):
        if isinstance(value, (bytes, float)):
            continue  # cannot arrive in JSON
        strict(callbacks.show_timeline(source, key, data, value or WIDE, "healthy"))
        strict(callbacks.show_layer(source, key, data, data, "healthy"))
    assert callbacks.show_summary(source, value, value) is no_update
    assert callbacks.show_layer(source, value, {}, {}, value) == (no_update,) * 6
    callbacks.poll(source, value, value)


@pytest.mark.parametrize("name", ["../healthy", "nope", "", "a/b/c", "x" * 5000, "broken"])
def test_a_page_of_a_run_that_cannot_be_shown_says_why(source: Source, name: str) -> None:
    run, body = page(source, Route("overview", name))

    shown = strict(body)
    assert run is None
    assert "No such run" in shown or "cannot be read" in shown
    assert '"href": "/"' in shown


def test_a_torn_part_leaves_the_loss_scale_on_the_page(source: Source) -> None:
    key = version(source, "torn")
    data, note, _ = callbacks.show_timeline(source, key, {}, WIDE, "torn")

    assert [trace["name"] for trace in data["figure"]["data"]] == ["loss scale"]
    assert "The heatmap could not be shown" in strict(note)
    assert "The audit could not be shown" in strict(callbacks.show_summary(source, key, "torn"))
    assert callbacks.show_layer(source, key, {}, {}, "torn")[0] is None


def test_polling_says_nothing_new_until_there_is(source: Source) -> None:
    first, badge, done = callbacks.poll(source, "healthy", None)
    again, _, _ = callbacks.poll(source, "healthy", first)

    assert first == version(source, "healthy")
    assert again is no_update
    assert "ended at step 39" in strict(badge)
    assert done is True


def test_polling_a_run_that_went_away_keeps_the_page_and_tells(source: Source) -> None:
    again, badge, done = callbacks.poll(source, "nope", "abc")

    assert again is no_update
    assert "unreadable: There is no run called nope" in strict(badge)
    assert done is False


def test_polling_the_list_fills_in_verdicts(tmp_path: Path) -> None:
    runs.one_step(tmp_path / "a")
    runs.one_step(tmp_path / "b")
    source = Source(tmp_path)
    before = strict(page(source, Route("runs")))

    first, _, done = callbacks.poll(source, None, None)

    assert "not judged yet" in before
    assert isinstance(first, str)
    assert done is False
    assert "not judged yet" not in strict(page(source, Route("runs")))


def test_a_folder_with_one_run_opens_on_it(tmp_path: Path) -> None:
    runs.one_step(tmp_path / "only")

    assert page(Source(tmp_path), Route("runs"))[0] == "only"


def test_an_empty_folder_says_how_to_record_a_run(tmp_path: Path) -> None:
    assert "gradaudit run train.py" in strict(page(Source(tmp_path), Route("runs")))


def test_a_pinned_layer_is_shown_and_an_unknown_one_is_named(source: Source) -> None:
    key = version(source, "underflowing")
    name = "model.layers.2.mlp.fc1"

    data, _, choices, chosen, _, span = callbacks.show_layer(source, key, {"layer": name}, {}, "underflowing")
    _, head, _, other, _, _ = callbacks.show_layer(source, key, {"layer": "<i>nope"}, {}, "underflowing")

    assert data["meta"]["name"] == chosen == name
    assert span == "all"
    assert name in {choice["value"] for choice in choices}
    assert other != "<i>nope"
    assert "No gradient called <i>nope was sampled" in strict(head)


def test_steps_of_a_pin_lead_to_the_worst_step_within_them(source: Source) -> None:
    key = version(source, "underflowing")

    inside = callbacks.show_layer(source, key, {"from": 10, "to": 20}, {"metric": "small"}, "underflowing")
    outside = callbacks.show_layer(source, key, {"from": 10**9, "to": 10**9}, {}, "underflowing")

    assert 10 <= inside[0]["meta"]["step"] <= 20
    assert inside[5] == "one"
    assert "worst of 10 to 20" in strict(inside[1])
    assert outside[0]["meta"]["step"] == 59
    assert "nearest to 1,000,000,000" in strict(outside[1])


def test_a_filter_that_matches_nothing_says_what_it_looked_for(source: Source) -> None:
    key = version(source, "underflowing")

    data, note, _ = callbacks.show_timeline(source, key, {"q": "zzz"}, WIDE, "underflowing")

    assert [trace["name"] for trace in data["figure"]["data"]] == ["loss scale"]
    assert "0 of 16 gradient tensors contain all of: zzz" in strict(note)


def test_a_run_that_waits_for_its_first_sampled_step_says_when_it_comes(tmp_path: Path) -> None:
    from tests import factory

    settings = {"every": 50}
    run_meta = factory.meta(runs.blocks(1), ended="running", settings=settings)
    factory.write_run(tmp_path / "a", run_meta=run_meta, steps=[factory.step(i, sampled=False) for i in range(13)])
    source = Source(tmp_path)

    _, note, _ = callbacks.show_timeline(source, version(source, "a"), {}, WIDE, "a")

    assert "training is at step 12 (every 50 steps)" in strict(note)


def test_a_finding_pins_a_row_of_the_heatmap(source: Source) -> None:
    shown = strict(callbacks.show_summary(source, version(source, "underflowing"), "underflowing"))

    assert '"data-pin": "model.layers.0.attn.q_proj"' in shown


def test_an_unforeseen_error_in_a_callback_becomes_a_small_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("<no> such thing")

    monkeypatch.setattr(callbacks, "page", fail)
    client = create_app(runs.one_step(tmp_path / "a")).server.test_client()
    entry = next(item for item in client.get("/_dash-dependencies").json if "page.children" in item["output"])
    outputs = [
        dict(zip(("id", "property"), part.split("."), strict=True)) for part in entry["output"].strip(".").split("...")
    ]

    answer = client.post(
        "/_dash-update-component",
        json={
            "output": entry["output"],
            "outputs": outputs,
            "inputs": [{"id": "url", "property": "pathname", "value": "/"}],
            "changedPropIds": ["url.pathname"],
        },
    )

    assert answer.status_code in (200, 204)
    assert "RuntimeError: <no> such thing" in strict(answer.json)
    assert "Traceback" not in answer.text
    assert "A callback failed" in caplog.text
