from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.cells import cell_len

from gradaudit.analysis.report import AuditReport, CheckResult, Place, Window
from gradaudit.reporters import FORMATS, html, json_, markdown, renderer, text
from gradaudit.reporters.layout import paragraph, wrap
from gradaudit.reporters.rows import scale_position, window_words, worst_layers
from gradaudit.reporters.words import clean
from tests.unit.reporters import reports
from tests.unit.reporters.reports import HOSTILE, REPORTS, UNICODE

LINE_LIMIT = 80

each_report = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
each_format = pytest.mark.parametrize("name", FORMATS)


@each_report
@each_format
def test_every_format_shows_every_report(name: str, report: AuditReport) -> None:
    shown = renderer(name)(report)

    assert shown.endswith("\n")
    assert report.verdict.level in shown.lower()
    assert "\x1b" not in shown
    shown.encode("utf-8")


@each_format
def test_the_same_report_gives_the_same_text(name: str) -> None:
    assert renderer(name)(reports.underflow()) == renderer(name)(reports.underflow())


@pytest.mark.parametrize("render", [text.render, markdown.render, html.render], ids=["text", "markdown", "html"])
def test_a_failing_report_tells_what_where_why_and_what_to_do(render: Callable[..., str]) -> None:
    shown = " ".join(render(reports.underflow()).split())

    for needed in (
        "400 attempted: 396 applied, 4 skipped (1.00 % of attempted)",
        "2^6 (64) at the first step",
        "blocks.3.mlp.fc1",
        "train.py:41",
        "SQNR 12.3 dB (threshold 40.0 dB)",
        "docs/findings.md#gradient-underflow",
        "2^14 (16,384)",
        "1 (between 0 and 3)",
        "0.250 %",
        "47.0 dB",
        "2^8 (256) to 2^15 (32,768)",
        "6 binades below it",
    ):
        assert needed in shown


@pytest.mark.parametrize("render", [markdown.render, html.render], ids=["markdown", "html"])
def test_why_a_check_could_not_look_is_said_where_there_is_room(render: Callable[..., str]) -> None:
    assert "one rank only" in render(reports.underflow())
    assert "1 had nothing to look at" in " ".join(text.render(reports.underflow()).split())


@pytest.mark.parametrize("render", [text.render, markdown.render, html.render], ids=["text", "markdown", "html"])
def test_what_follows_from_a_finding_stands_under_it(render: Callable[..., str]) -> None:
    lead = reports.finding(id="forward-overflow", title="A product overflows", severity="error")
    follows = reports.finding(id="scale-collapse", title="The scale collapses", consequence_of="forward-overflow")
    other = reports.finding(id="several-scalers", title="Two scalers", severity="warning")
    shown = " ".join(render(reports.healthy(findings=(other, lead, follows))).split())

    assert shown.index("A product overflows") < shown.index("The scale collapses") < shown.index("Two scalers")
    assert shown.count("The scale collapses") == 1


@pytest.mark.parametrize("render", [text.render, markdown.render, html.render], ids=["text", "markdown", "html"])
def test_findings_come_worst_first(render: Callable[..., str]) -> None:
    shown = render(reports.underflow())

    assert shown.index("ERROR") < shown.index("INFO")


@pytest.mark.parametrize("render", [text.render, markdown.render, html.render], ids=["text", "markdown", "html"])
def test_a_finding_in_many_places_lists_a_few_and_counts_the_rest(render: Callable[..., str]) -> None:
    places = tuple(Place("module", f"layer.{i}") for i in range(1205))
    shown = render(reports.healthy(findings=(reports.finding(where=places),)))

    assert "layer.4" in shown
    assert "layer.5" not in shown
    assert "1,200 more" in shown


# text


@each_report
def test_text_stays_within_80_columns_but_for_single_names(report: AuditReport) -> None:
    name = max((clean(layer.fqn) for layer in report.layers), key=len, default="")

    for line in text.render(report, width=LINE_LIMIT).splitlines():
        assert cell_len(line) <= LINE_LIMIT or (len(name) > LINE_LIMIT / 2 and name[:40] in line), line
        assert line == line.rstrip()


def test_text_never_breaks_a_name() -> None:
    report = REPORTS["long names"]
    name = report.layers[1].fqn

    assert len(name) > LINE_LIMIT
    assert text.render(report, width=60).count(name) >= 8


def test_a_name_with_a_space_stays_on_one_line() -> None:
    report = replace(reports.underflow(), layers=(reports.layer("a" * 60, 3.0, kind="op_grad", op="MulBackward0"),))

    assert f"{'a' * 60} [MulBackward0] (op_grad)" in text.render(report).replace("\n" + " " * 14, " ")
    assert any(line.endswith("[MulBackward0]") for line in text.render(report).splitlines())


def test_a_unit_stays_with_its_number() -> None:
    assert wrap("keeps 12.3 dB", 11) == ["keeps", "12.3 dB"]
    assert wrap("at 2^4 (16) now", 9) == ["at", "2^4 (16)", "now"]


def test_a_paragraph_without_words_is_one_empty_line() -> None:
    assert [line.plain for line in paragraph("", width=80, first="Label", indent=8)] == ["Label   "]


def test_a_healthy_report_is_short() -> None:
    shown = text.render(reports.healthy())

    assert len(shown.splitlines()) < 22
    assert "keep the scaler's settings" in shown
    assert "growth_interval" not in shown
    assert "lowest SQNR 61.0 dB in blocks.0.mlp" in shown


def test_text_has_colour_only_when_asked() -> None:
    report = reports.underflow()
    coloured = text.render(report, colour=True)

    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == text.render(report)


def test_a_name_cannot_send_commands_to_the_terminal() -> None:
    shown = text.render(REPORTS["hostile names"])

    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert r"\x1b[31m\u202e" in shown


def test_a_bf16_recommendation_gives_no_scaler_settings() -> None:
    report = reports.healthy(recommendation=reports.recommendation(precision="bf16"))

    for render in (text.render, markdown.render, html.render):
        assert "train in BF16" in render(report)
        assert "growth_interval" not in render(report)


# json


@each_report
def test_json_is_strict(report: AuditReport) -> None:
    def forbid(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(json_.render(report), parse_constant=forbid) == report.to_dict()


def test_json_has_the_fields_scripts_rely_on() -> None:
    body = json.loads(json_.render(reports.underflow()))
    finding, recommendation, layer = body["findings"][1], body["recommendation"], body["layers"][0]

    assert (body["format"], body["version"]) == ("gradaudit-report", 1)
    assert body.keys() >= {"run", "verdict", "findings", "checks", "recommendation", "layers"}
    assert body["run"].keys() >= {"num_steps", "num_applied", "num_skipped", "scale_first", "scale_last", "world_size",
                                  "complete", "ended", "incomplete_because"}  # fmt: skip
    assert body["verdict"].keys() == {"level", "summary"}
    assert finding.keys() >= {"id", "severity", "confidence", "title", "summary", "scale_can_fix", "where", "steps",
                              "evidence", "remedy", "docs"}  # fmt: skip
    assert finding["where"][1].keys() == {"type", "name", "file", "line"}
    assert finding["evidence"][0].keys() == {"name", "value", "unit", "threshold"}
    assert body["checks"][0].keys() == {"id", "status", "reason"}
    assert recommendation.keys() >= {
        "change_needed", "precision", "init_scale", "growth_interval", "growth_factor", "backoff_factor", "min_scale",
        "window", "predicted", "current", "reasons",
    }  # fmt: skip
    assert recommendation["window"].keys() == {"low_log2", "high_log2", "limited_low_by", "limited_high_by"}
    assert recommendation["predicted"].keys() >= {"num_skipped", "skip_rate", "min_sqnr_db"}
    assert layer.keys() >= {"fqn", "kind", "zones", "sqnr_db", "window_low_log2", "window_high_log2", "amax_log2"}


def test_json_writes_non_finite_numbers_as_strings() -> None:
    assert json.loads(json_.dumps({"a": [float("inf"), -float("inf"), float("nan")], "b": {"c": (1.5, None)}})) == {
        "a": ["inf", "-inf", "nan"],
        "b": {"c": [1.5, None]},
    }


# markdown


def test_no_name_becomes_markup() -> None:
    shown = markdown.render(REPORTS["hostile names"])
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", shown.replace("\\`", ""))

    assert not re.search(r"(?<!\\)<", outside_code)
    assert not re.search(r"(?<!\\)\[", outside_code)
    assert "\n# heading" not in shown


def test_every_table_row_has_as_many_cells_as_its_header() -> None:
    for report in REPORTS.values():
        width = None
        for line in markdown.render(report).splitlines():
            if not line.startswith("|"):
                width = None
                continue
            cells = len(re.findall(r"(?<!\\)\|", line))
            width = width or cells
            assert cells == width, line


def test_code_spans_hold_backticks_and_bars() -> None:
    assert markdown.code("fc") == "`fc`"
    assert markdown.code("a`b") == "``a`b``"
    assert markdown.code("`a") == "`` `a ``"
    assert markdown.code("a|b") == "`a\\|b`"
    assert markdown.escaped("init_scale=2**14 _x_ <b>") == r"init_scale=2\*\*14 \_x\_ \<b\>"


# html


class Page(HTMLParser):
    """Tags, attributes and visible words of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@each_report
def test_html_loads_and_runs_nothing(report: AuditReport) -> None:
    source = html.render(report)
    page = Page(source)

    assert not page.open
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "xlink:href")]
    assert not re.search(r"https?://|url\(|@import|//", re.sub(r"(?<=>)[^<]*", "", source).partition("<body>")[2])
    assert "default-src 'none'; style-src 'unsafe-inline'" in source


def test_html_escapes_names_everywhere_also_inside_charts() -> None:
    source = html.render(REPORTS["hostile names"])
    page = Page(source)

    assert source.count("<style>") == source.count("</style>") == 1
    assert "<script" not in source
    assert r"</style><script>alert('x')</script>" in page.words
    assert HOSTILE not in source


def test_html_keeps_names_in_any_language() -> None:
    assert UNICODE in html.render(REPORTS["unicode names"])


def test_html_draws_scale_windows_and_zones_of_a_failing_run() -> None:
    source = html.render(reports.underflow())

    assert "Loss scale over 400 steps, 4 skipped" in source
    assert "Safe windows of 5 tensors in powers of two" in source
    assert source.count("flushed 41.2 %") >= 2


def test_html_of_many_layers_draws_only_the_worst_and_lists_the_rest() -> None:
    source = html.render(REPORTS["many layers"])

    assert source.count('class="layer"') == 10
    assert "layers.1999.mlp" in source
    assert len(source) < 2_000_000


def test_html_says_where_its_table_ends() -> None:
    layers = tuple(reports.layer(f"layers.{i}", 30.0, tensor=i) for i in range(html.MAX_TABLE_ROWS + 1))

    assert "The first 2,000; the JSON report holds all." in html.render(reports.healthy(layers=layers))


# what is chosen


def test_the_worst_layers_are_those_with_nothing_but_nan_then_the_lowest_sqnr() -> None:
    report = reports.healthy(
        layers=(
            reports.layer("fine", 60.0, tensor=0),
            reports.layer("low", 3.0, tensor=1),
            reports.layer("not fp16", None, tensor=2),
            reports.layer("broken", None, tensor=3, zones=reports.zones(nan=1.0)),
            reports.layer("unknown", float("nan"), tensor=4),
        )
    )

    assert [layer.fqn for layer in worst_layers(report)] == ["broken", "unknown", "low", "fine"]


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (Window(8, 15, None, None), "2^8 (256) to 2^15 (32,768)"),
        (Window(None, 15, None, None), "up to 2^15 (32,768)"),
        (Window(8, None, None, None), "2^8 (256) and up"),
        (Window(None, None, None, None), "unbounded: no recorded gradient limits it"),
        (Window(13, 9, None, None), "empty: values are lost below 2^13 (8,192), and overflow begins above 2^9 (512)"),
    ],
)
def test_a_window_is_said_in_words(window: Window, words: str) -> None:
    assert window_words(window) == words


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (256.0, "the last scale, 2^8 (256), is inside it"),
        (32768.0, "the last scale, 2^15 (32,768), is inside it"),
        (128.0, "the last scale, 2^7 (128), is 1 binade below it"),
        (131072.0, "the last scale, 2^17 (131,072), is 2 binades above it"),
        (0.0, ""),
        (None, ""),
    ],
)
def test_the_last_scale_is_placed_against_the_window(scale: float | None, words: str) -> None:
    assert scale_position(Window(8, 15, None, None), scale) == words


def test_checks_that_could_not_look_say_why() -> None:
    report = reports.healthy(checks=(CheckResult("call-order", "errored", "KeyError: 'seq'"),))

    for render in (text.render, markdown.render, html.render):
        assert "errored" in render(report)
