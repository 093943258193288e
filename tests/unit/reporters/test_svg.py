from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from gradaudit.analysis.report import History
from gradaudit.reporters.palette import ZONE_COLOURS
from gradaudit.reporters.svg import MAX_COLUMNS, WindowBar, scale_chart, swatch, window_chart, zone_bar
from tests.unit.reporters.reports import HOSTILE, zones

RUN = WindowBar("run", 8, 15)


def percents(element: ET.Element, *names: str) -> list[float]:
    return [float(element.attrib[name].rstrip("%")) for name in names]


def test_a_scale_chart_without_a_scale_is_nothing() -> None:
    assert scale_chart(History()) == ""
    assert scale_chart(History(((0, float("inf")), (1, 0.0)))) == ""


def test_one_step_is_drawn_as_a_level_line() -> None:
    drawing = ET.fromstring(scale_chart(History(((7, 65536.0),))))

    assert drawing.find(".//path").attrib["d"].endswith("H100")
    assert [text.text for text in drawing.iter("text")].count("step 7") == 1


def test_a_skipped_step_is_marked_at_the_scale_it_was_skipped_at() -> None:
    history = History(((0, 65536.0), (5, 32768.0), (10, 32768.0)), (4,))
    drawing = ET.fromstring(scale_chart(history))
    (mark,) = drawing.iter("circle")

    assert mark.find("title").text == "step 4 skipped at 2^16 (65,536)"
    assert percents(mark, "cx") == [40.0]


def test_a_long_run_is_thinned_without_losing_its_lowest_scale() -> None:
    points = tuple((i, 2.0 ** (10 + i % 2)) for i in range(100_000))
    points = (*points[:50_001], (50_001, 2.0**-3), *points[50_002:])
    drawing = scale_chart(History(points, tuple(range(0, 100_000, 3))))
    levels = {float(level) for level in re.findall(r"V([0-9.]+)", drawing)}

    assert len(drawing) < 150_000
    assert drawing.count("<circle") <= MAX_COLUMNS + 1
    assert len(levels) == 3


def test_window_bars_reach_from_edge_to_edge_and_to_the_border_where_unbounded() -> None:
    bars = [WindowBar("a", 8, 18), WindowBar("b", None, 15)]
    drawing = ET.fromstring(window_chart(bars, RUN, 2.0**12))
    rows = [rect for rect in drawing.iter("rect") if rect.attrib["class"] == "bar"]
    safe = next(rect for rect in drawing.iter("rect") if rect.attrib["class"] == "safe")

    assert percents(rows[0], "x") == percents(safe, "x")
    assert percents(rows[1], "x") == [0.0]
    assert sum(percents(rows[1], "x", "width")) == pytest.approx(sum(percents(safe, "x", "width")), abs=0.02)
    assert rows[1].find("title").text == "b: unbounded to 2^15"
    assert "scale in force 2^12 (4,096)" in [title.text for title in drawing.iter("title")]


def test_an_empty_run_window_shades_the_gap() -> None:
    bars = [WindowBar("a", 13, None), WindowBar("b", None, 9), WindowBar("crossed", 12, 10)]
    drawing = ET.fromstring(window_chart(bars, WindowBar("run", 13, 9), None))
    kinds = [rect.attrib["class"] for rect in drawing.iter("rect")]

    assert kinds == ["conflict", "bar", "bar", "bar crossed"]
    assert "force" not in [line.attrib["class"] for line in drawing.iter("line")]


def test_a_window_chart_without_edges_is_nothing() -> None:
    assert window_chart([], RUN, 1.0) == ""
    assert window_chart([WindowBar("a", None, None)], WindowBar("run", None, None), 1.0) == ""


def test_a_long_name_keeps_its_end_and_the_tooltip_has_all_of_it() -> None:
    name = ".".join(f"stage_{i}" for i in range(20))
    drawing = ET.fromstring(window_chart([WindowBar(name, 8, 18)], RUN, None))
    label = next(text.text for text in drawing.iter("text") if text.attrib["class"] == "name")

    assert label.startswith("...")
    assert name.endswith(label[3:])
    assert any(title.text.startswith(name) for title in drawing.iter("title"))


def test_names_are_escaped_inside_a_drawing() -> None:
    source = window_chart([WindowBar(HOSTILE, 8, 18)], RUN, None)

    assert "<script" not in source
    assert "</style" not in source
    assert any(HOSTILE[:20] in title.text for title in ET.fromstring(source).iter("title"))


def test_zone_pieces_follow_each_other_and_fill_the_bar() -> None:
    drawing = ET.fromstring(zone_bar(zones(zero=0.05, flushed=0.412, subnormal=0.338, normal=0.2)))
    pieces = list(drawing.iter("rect"))

    assert [piece.attrib["fill"] for piece in pieces] == [
        ZONE_COLOURS[zone] for zone in ("zero", "flushed", "subnormal", "normal")
    ]
    assert sum(percents(pieces[-1], "x", "width")) == pytest.approx(100, abs=0.01)
    assert drawing.find("title").text == "zero 5.00 %, flushed 41.2 %, subnormal 33.8 %, normal 20.0 %"


def test_a_bar_of_nothing_says_so() -> None:
    assert ET.fromstring(zone_bar(zones())).find("title").text == "no elements"


def test_nan_is_outlined_so_that_it_shows_on_a_dark_page() -> None:
    assert "stroke=" in zone_bar(zones(nan=1.0))
    assert "stroke=" in swatch("nan")
    assert "stroke=" not in swatch("normal")
