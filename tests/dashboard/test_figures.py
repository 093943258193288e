from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaudit.reporters.palette import ZONE_COLOURS
from gradaudit.store import open_run
from gradaudit_dashboard import colours, figures
from gradaudit_dashboard.exponents import gather
from gradaudit_dashboard.heat import FINE, METRIC_TABLE, WORST, Matrix, Pooled, pool
from tests.dashboard import runs


def decoded(body: dict[str, str]) -> np.ndarray:
    array = np.frombuffer(base64.b64decode(body["bdata"]), dtype=np.dtype(body["dtype"]))
    return array.reshape([int(size) for size in body["shape"].split(",")]) if "shape" in body else array


def heat(codes: np.ndarray, **limits: int) -> Pooled:
    rows, columns = codes.shape
    scale = np.full(columns, 2.0**16)
    matrix = Matrix(codes.astype(np.uint8), np.arange(rows), np.arange(rows), np.arange(columns), scale, scale)
    return pool(matrix, np.arange(rows), **limits)


def trace(figure: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(item for item in figure["data"] if item["type"] == kind)


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [str(key), *texts(item)]]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


NAMES = ("model.layers.0.mlp", "model.layers.1.mlp")
POINTS = ((0, 65536.0), (3, 32768.0), (9, 32768.0))


def test_the_heatmap_decodes_to_the_codes_it_was_given() -> None:
    codes = np.array([[FINE, 100, WORST], [0, 1, 77]])

    cells = trace(figures.timeline(POINTS, (), heat(codes), names=NAMES), "heatmap")

    assert cells["z"]["dtype"] == "u1"
    assert decoded(cells["z"]).tolist() == codes.tolist()
    assert cells["y"] == list(NAMES)
    assert decoded(cells["x"]).tolist() == [-0.5, 0.5, 1.5, 2.5]


def test_the_scale_is_a_step_line_of_powers_of_two_with_its_skips_on_it() -> None:
    figure = figures.timeline(POINTS, (3, 5), None)

    line, skips = figure["data"]
    assert line["line"]["shape"] == "hv"
    assert decoded(line["x"]).tolist() == [0, 3, 9]
    assert line["y"] == [16, 15, 15]
    assert line["text"][0] == "2^16 (65,536)"
    assert decoded(skips["x"]).tolist() == [3, 5]
    assert skips["y"] == [15, 15]
    assert skips["text"] == ["step 3 skipped at scale 2^15 (32,768)", "step 5 skipped at scale 2^15 (32,768)"]


def test_scale_and_heatmap_share_one_step_axis() -> None:
    figure = figures.timeline(POINTS, (), heat(np.full((2, 10), FINE)), names=NAMES)

    assert trace(figure, "heatmap")["xaxis"] == "x"
    assert "xaxis" not in trace(figure, "scatter")  # plotly's first axis, as well
    assert figure["layout"]["xaxis"]["autorangeoptions"] == {"minallowed": -0.5, "maxallowed": 9.5}


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0])
def test_a_scale_that_has_no_logarithm_leaves_a_gap_and_no_nan(scale: float) -> None:
    figure = figures.timeline(((0, 1024.0), (1, scale), (2, scale)), (1,), None)

    assert figure["data"][0]["y"] == [10, None, None]
    json.dumps(figure, allow_nan=False)


def test_names_are_escaped_before_they_enter_a_figure() -> None:
    codes = np.full((2, 3), FINE)

    figure = figures.timeline(POINTS, (), heat(codes), names=(runs.HOSTILE, "a\x1b[31m"), run="<b>run")
    layout = figure["layout"]
    shown = texts([trace(figure, "heatmap"), layout["yaxis"], layout["annotations"]])

    assert not [text for text in shown if "<" in text or ">" in text]
    assert not [text for text in shown if "\x1b" in text]
    assert "&lt;a href=" in trace(figure, "heatmap")["y"][0]


@given(st.text(min_size=1, max_size=80), st.integers(8, 40))
def test_a_shortened_name_stays_escaped_and_fits(name: str, length: int) -> None:
    short = figures.short(figures.escape(name), length)
    plain = short.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")

    assert "<" not in short
    assert len(plain) <= length


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (40, "model.layers.10.attn.q_proj"),
        (24, "m.layers.10.attn.q_proj"),
        (17, "m.l.10.a.q_proj"),
        (10, "...q_proj"),
    ],
)
def test_parts_of_a_name_shrink_from_the_front_and_numbers_stay(length: int, text: str) -> None:
    assert figures.short("model.layers.10.attn.q_proj", length) == text


def test_a_full_heatmap_fits_the_payload_budget() -> None:
    rng = np.random.default_rng(0)
    pooled = heat(rng.integers(0, 256, (1000, 3000)))
    names = [f"model.layers.{i}.attn.q_proj" for i in range(1000)]

    body = orjson.dumps(
        {
            "figure": figures.timeline(POINTS, (), pooled, names=names),
            "meta": figures.timeline_meta(pooled, names, "sqnr", 40),
        }
    )

    assert pooled.codes.size <= 300_000
    assert len(body) <= 480_000  # of which 300,000 are the cells of these 250 rows


def test_merged_rows_and_columns_say_so() -> None:
    pooled = heat(np.full((5, 8), FINE), max_rows=2, max_columns=4)
    names = [f"layer{i}" for i in range(5)]

    meta = figures.timeline_meta(pooled, names, "small", 40.0)
    figure = figures.timeline((), (), pooled, names=names)

    assert trace(figure, "heatmap")["y"] == ["layer0 +2", "layer3 +1"]
    assert meta["members"] == [["layer0", "layer1", "layer2"], ["layer3", "layer4"]]
    assert meta["columns"][0] == "worst of 2 sampled steps 0 to 1"
    assert meta["scales"][meta["scaleOf"][0]] == "2^16 (65,536)"
    assert meta["steps"][1] == (2, 3)


@pytest.mark.parametrize("metric", METRIC_TABLE)
@pytest.mark.parametrize("theme", colours.RAMPS)
def test_colours_show_no_data_as_grey_fine_as_nothing_and_bad_as_colour(metric: str, theme: str) -> None:
    scale = colours.colourscale(metric, theme)
    at = [place for place, _ in scale]

    assert at == sorted(at)
    assert (at[0], at[-1]) == (0, 1)
    assert scale[0][1] == colours.NOT_SAMPLED_COLOUR
    assert [colour for place, colour in scale if abs(place * WORST - FINE) <= 0.5][1] == "rgba(0,0,0,0)"
    assert scale[-1][1] == colours.ramp_colour(theme, 1.0)


def test_a_long_line_is_thinned_without_losing_an_extreme() -> None:
    points = [(i, 1024.0) for i in range(50_000)]
    points[31_234] = (31_234, 2.0**30)
    points[777] = (777, 1.0)

    thin = figures.thin_line(points, 500)

    assert len(thin) <= 500
    assert {points[0], points[-1], points[31_234], points[777]} <= set(thin)
    assert thin == sorted(thin)


def test_too_many_skips_share_marks_that_count_them() -> None:
    marks = figures.skip_marks(((0, 1.0), (9999, 1.0)), range(10_000), 100)

    assert len(marks) == 100
    assert marks[0][2] == "100 of the steps 0 to 99 skipped, the first at scale 2^0 (1)"


def test_a_histogram_shows_shares_of_all_elements_per_power_of_two(tmp_path: Path) -> None:
    run = open_run(runs.training(tmp_path / "a", layers=1, num_steps=2))
    gathered = gather(run.samples())

    figure, meta = figures.histogram(gathered), figures.histogram_meta(gathered)
    bars = figure["data"][0]

    assert decoded(bars["x"]).tolist() == [exponent + 0.5 for exponent in meta["exponents"]]
    assert decoded(bars["y"]).sum() == pytest.approx(100 * gathered.counts.sum() / gathered.numel)
    assert bars["customdata"][0].startswith(f"2^{meta['exponents'][0]} to ")
    assert [limit["text"] for limit in meta["limits"]] == ["2^-25 flush", "2^-14 normal", "65,504 max"]
    assert {band["colour"] for band in meta["bands"]} <= set(ZONE_COLOURS.values())
    assert len(meta["shares"]) == len(meta["scales"]) == meta["high"] - meta["low"] + 1


@pytest.mark.parametrize("make", [runs.all_nan, runs.all_zero])
def test_a_layer_without_a_finite_value_gets_words_instead_of_bars(tmp_path: Path, make: Any) -> None:
    gathered = gather(open_run(make(tmp_path / "a")).samples(tensors=[0]))

    figure = figures.histogram(gathered)

    assert figure["layout"]["annotations"][0]["text"] == "no element is finite and non-zero"
    json.dumps([figure, figures.histogram_meta(gathered)], allow_nan=False)


def test_no_figure_uses_webgl_and_no_graph_offers_to_send_data_away() -> None:
    figure = figures.timeline(POINTS, (3,), heat(np.full((2, 3), FINE)), names=NAMES)

    assert not [item for item in figure["data"] if item["type"].endswith("gl")]
    assert figures.GRAPH_CONFIG["showSendToCloud"] is False
    assert figures.GRAPH_CONFIG["plotlyServerURL"] == ""
