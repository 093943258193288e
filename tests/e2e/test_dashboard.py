from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from gradaudit.store.writer import RunWriter
from tests import factory
from tests.dashboard import runs
from tests.e2e.conftest import Watched, serving

pytestmark = pytest.mark.e2e

SHAPES = ("healthy", "underflowing", "empty", "one_step", "all_nan", "all_zero", "hostile", "torn", "broken")
Watch = Callable[..., Watched]
PINNED = "model.layers.1.mlp.fc2"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    for name in SHAPES:
        getattr(runs, name)(root / name)
    with serving(root) as address:
        yield address


def drawn(page: Page) -> None:
    """Wait until both charts are on the page."""
    expect(page.locator("#timeline .heatmaplayer .hm")).to_be_visible()
    expect(page.locator("#histogram .nsewdrag")).to_be_visible()


def query(page: Page) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}


def click_row(page: Page, row: int, rows: int, *, across: float = 0.5) -> None:
    plot = page.locator("#timeline .nsewdrag[data-subplot=xy]")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    x, y = box["x"] + across * box["width"], box["y"] + (row + 0.5) * box["height"] / rows
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    page.mouse.click(x, y)


def step_range(page: Page) -> list[float]:
    """First and last step of the chart's axis."""
    shown = page.evaluate("document.querySelector('#timeline .js-plotly-plot').layout.xaxis.range")
    return [round(float(end), 6) for end in shown]


def zoom(page: Page) -> list[float]:
    """Drag over the middle of the heatmap; the range that is shown then."""
    plot = page.locator("#timeline .nsewdrag[data-subplot=xy]")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    before = step_range(page)
    page.mouse.move(box["x"] + 0.3 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], y, steps=5)
    page.mouse.up()
    page.wait_for_timeout(500)
    after = step_range(page)
    assert before[0] < after[0] < after[1] < before[1]
    return after


@pytest.mark.parametrize(
    ("name", "width", "theme"),
    [(name, *look) for name in SHAPES for look in ((1440, "light"), (420, "dark"))]
    + [("underflowing", 1440, "dark"), ("underflowing", 420, "light")],
)
def test_every_run_opens_in_every_state_without_an_error_or_sideways_scrolling(
    watch: Watch, url: str, shots: Path, name: str, width: int, theme: str
) -> None:
    watched = watch(url, width=width, theme=theme)
    page = watched.open(f"/r/{name}")

    expect(page.locator("h1")).to_have_text(name)
    if name == "broken":
        expect(page.locator(".message.error")).to_contain_text("run.json cannot be read")
    else:
        expect(page.locator(".skeleton")).to_have_count(0)
        expect(page.locator("#status .badge")).to_contain_text("ended")
    if name not in ("empty", "torn", "broken"):
        drawn(page)
    assert watched.sideways() == 0
    page.screenshot(path=shots / f"{name}-{width}-{theme}.png", full_page=True)


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (420, "dark")])
def test_the_list_shows_every_run_and_says_why_one_cannot_be_read(
    watch: Watch, url: str, shots: Path, width: int, theme: str
) -> None:
    watched = watch(url, width=width, theme=theme)
    page = watched.open("/")

    for name in SHAPES:
        expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()
    expect(page.locator("tr", has=page.get_by_role("link", name="broken"))).to_contain_text("unreadable: ")
    judged = page.locator("tr", has=page.get_by_role("link", name="underflowing"))
    expect(judged).to_contain_text(re.compile("ATTENTION|FAILING"), timeout=20_000)
    expect(page.get_by_text("not judged yet")).to_have_count(0, timeout=20_000)
    assert watched.sideways() == 0
    page.screenshot(path=shots / f"list-{width}-{theme}.png", full_page=True)

    page.get_by_role("link", name="healthy", exact=True).click()
    expect(page.locator("h1")).to_have_text("healthy")


def test_a_click_on_the_heatmap_pins_that_layer_and_step(watch: Watch, url: str) -> None:
    page = watch(url).open("/r/underflowing?sort=model")
    drawn(page)

    click_row(page, 7, 16)

    expect(page.locator("#layer-head")).to_contain_text(PINNED)
    assert query(page)["layer"] == PINNED
    assert query(page)["from"] == query(page)["to"]
    expect(page.locator("#layer-head")).to_contain_text(f"step {query(page)['from']}")


def test_a_finding_pins_its_layer_and_the_back_button_takes_it_back(watch: Watch, url: str) -> None:
    page = watch(url).open("/r/underflowing")
    drawn(page)
    button = page.locator("#summary [data-pin]").last
    name = button.inner_text()

    button.click()
    expect(page.locator("#layer-head")).to_contain_text(name)
    assert query(page)["layer"] == name

    page.go_back()
    expect(page.locator("#layer-head")).to_contain_text("model.layers.0.attn.q_proj")
    assert query(page) == {}


def test_the_slider_moves_limits_and_shares_without_asking_the_server(watch: Watch, url: str) -> None:
    watched = watch(url)
    page = watched.open("/r/underflowing?layer=" + PINNED)
    drawn(page)
    expect(page.locator("#shares")).to_contain_text("At scale 2^8 (256): shares of all")
    before = page.locator("#share-normal").inner_text()
    limit = page.locator("#histogram .annotation", has_text="2^-14 normal")
    left = (limit.bounding_box() or {})["x"]
    page.wait_for_timeout(500)
    asked = watched.num_updates

    page.get_by_role("slider").focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")

    expect(page.locator("#shares")).to_contain_text("At scale 2^16 (65,536): shares of all")
    expect(page.locator("#share-normal")).not_to_have_text(before)
    expect(page.locator("#scale-text")).to_have_text("2^16 (65,536)")
    page.wait_for_timeout(500)
    assert watched.num_updates == asked
    assert query(page)["k"] == "16"
    assert (limit.bounding_box() or {})["x"] < left

    page.get_by_role("button", name="Back to the scale in force").click()
    expect(page.locator("#share-normal")).to_have_text(before)
    assert "k" not in query(page)


def test_a_link_carries_the_whole_state(watch: Watch, url: str) -> None:
    link = f"/r/underflowing?layer={PINNED}&from=5&to=5&k=20&sort=model&metric=small&q=layers.1"
    page = watch(url).open(link)
    drawn(page)

    expect(page.locator("#layer-head")).to_contain_text(PINNED)
    expect(page.locator("#layer-head")).to_contain_text("step 5")
    expect(page.locator("#scale-text")).to_have_text("2^20 (1,048,576)")
    expect(page.locator("#sort")).to_have_value("Model order")
    expect(page.locator("#metric")).to_have_value("Flushed + subnormal")
    expect(page.locator("#filter")).to_have_value("layers.1")
    expect(page.locator("#timeline .ytick text")).to_have_count(4)
    assert page.url.endswith(link)


@pytest.mark.parametrize(
    "search", ["?k=1e9&sort=x&metric=%00&from=-4&to=x&layer=nope", "?k=999999999999999999", "?%%%&&=&"]
)
def test_an_odd_link_shows_the_page_with_what_makes_sense(watch: Watch, url: str, search: str) -> None:
    page = watch(url).open("/r/underflowing" + search)

    drawn(page)
    expect(page.locator("#shares")).to_contain_text("At scale 2^")


def test_controls_write_the_address_and_the_heatmap_follows(watch: Watch, url: str) -> None:
    page = watch(url).open("/r/underflowing")
    drawn(page)

    page.locator("#filter").fill("attn LAYERS.3")
    expect(page.locator("#timeline .ytick text")).to_have_count(2)
    page.locator("#metric").click()
    page.get_by_role("option", name="Exact zeros").click()
    expect(page.locator("#timeline .annotation-text").last).to_contain_text("exact zeros, % of all elements")
    page.locator("#layer-select").click()
    page.locator("#layer-select").fill("3.mlp.fc2")
    page.get_by_role("option").first.click()

    expect(page.locator("#layer-head")).to_contain_text("model.layers.3.mlp.fc2")
    assert query(page) == {"q": "attn LAYERS.3", "metric": "zero", "layer": "model.layers.3.mlp.fc2"}


def test_the_pointer_gets_name_value_step_and_scale_of_a_cell(watch: Watch, url: str) -> None:
    page = watch(url).open("/r/underflowing")
    drawn(page)
    plot = page.locator("#timeline .nsewdrag[data-subplot=xy]")
    plot.scroll_into_view_if_needed()

    plot.hover(position={"x": 300, "y": 8})
    plot.hover(position={"x": 304, "y": 10})

    expect(page.locator("#timeline-tip")).to_contain_text("model.layers.0.attn.q_proj")
    expect(page.locator("#timeline-tip")).to_contain_text(
        re.compile(r"SQNR .*step \d+, at scale 2\^8 \(256\)", re.DOTALL)
    )


def test_hostile_names_are_text_everywhere(watch: Watch, url: str) -> None:
    page = watch(url).open("/r/hostile")
    drawn(page)

    assert page.locator("a[href*='evil'], #timeline a, #histogram a").count() == 0
    expect(page.locator("#layer-head")).to_contain_text('<a href="https://evil.example">')


def test_the_theme_button_switches_the_charts_without_asking_the_server(watch: Watch, url: str) -> None:
    watched = watch(url)
    page = watched.open("/r/underflowing")
    drawn(page)
    page.wait_for_timeout(500)
    asked = watched.num_updates
    colour = "getComputedStyle(document.querySelector('#timeline .ytick text')).fill"
    before = page.evaluate(colour)

    page.locator("header button").click()

    expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", "dark")
    page.wait_for_timeout(500)
    assert page.evaluate(colour) != before
    assert watched.num_updates == asked


def test_nothing_is_asked_of_the_server_once_a_run_ended(watch: Watch, url: str) -> None:
    watched = watch(url)
    page = watched.open("/r/healthy")
    drawn(page)
    asked = -1
    while watched.num_updates != asked:  # a slow machine may still be asking for its first pictures
        asked = watched.num_updates
        page.wait_for_timeout(2500)

    page.wait_for_timeout(4500)

    assert watched.num_updates == asked


def test_an_unknown_run_or_page_is_friendly(watch: Watch, url: str) -> None:
    page = watch(url).open("/r/nope")
    expect(page.locator(".message.error")).to_contain_text("There is no run called nope")
    page.get_by_role("link", name="All runs").click()
    expect(page.locator("h1")).to_have_text("Runs")


def test_a_live_run_shows_new_steps_and_keeps_zoom_and_selection(watch: Watch, tmp_path: Path) -> None:
    writer = RunWriter(
        tmp_path / "live",
        rank=0,
        meta=factory.meta(runs.blocks(4), ended=None, host="elsewhere", heartbeat_at=time.time() + 600),
    )
    stop = threading.Event()

    def add(index: int) -> None:
        writer.append("steps", [factory.step(index)])
        writer.append("samples", [runs.recorded(index, t, -14.0, 65536.0, order=3 - t) for t in range(4)])
        writer.flush()

    def train() -> None:
        index = 20
        while not stop.wait(0.5):
            add(index)
            index += 1

    for index in range(20):
        add(index)
    with serving(tmp_path) as url:
        page = watch(url).open("/?layer=model.layers.0.mlp.fc1")
        drawn(page)
        expect(page.locator("#status .badge")).to_have_text("live, step 19")
        zoomed = zoom(page)
        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            expect(page.locator("#status .badge")).to_have_text(re.compile(r"live, step 2[1-9]"), timeout=30_000)
            expect(page.locator("#timeline-note")).to_contain_text(re.compile(r"2[1-9] sampled steps"), timeout=30_000)
        finally:
            stop.set()
            trainer.join()
        writer.meta["ended"] = "ok"
        writer.write_meta()

        expect(page.locator("#status .badge")).to_have_text(re.compile(r"ended at step \d+"), timeout=30_000)
        expect(page.locator("#layer-head")).to_contain_text("model.layers.0.mlp.fc1")
        assert step_range(page) == zoomed
