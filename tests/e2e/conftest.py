from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from gradaudit_dashboard.serve import address, bind

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
expect.set_options(timeout=30_000)  # how long to wait, not how fast to be: machines under load draw slowly
IGNORED_SCHEMES = ("data", "blob")


@dataclass
class Watched:
    """A page and what it did: callbacks asked of the server, requests to anywhere else, console errors."""

    page: Page
    url: str
    num_updates: int = 0
    strangers: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self._note(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None,
        )

    def _note(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in IGNORED_SCHEMES:
            return
        if parts.hostname != "127.0.0.1":
            self.strangers.append(url)
        self.num_updates += parts.path == "/_dash-update-component"

    def open(self, path: str) -> Page:
        self.page.goto(self.url.rstrip("/") + path)
        return self.page

    def sideways(self) -> int:
        """Pixels the page can be scrolled sideways."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@contextmanager
def serving(path: Path) -> Iterator[str]:
    """The dashboard of a folder on a free port."""
    server = bind(path, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield address(server)
    finally:
        # in the loop's own thread: closing a socket it waits for would be an error there
        server.trigger.pull_trigger(lambda: server.asyncore.close_all(server._map, ignore_all=True))
        thread.join(timeout=5)
        server.task_dispatcher.shutdown(timeout=0.5)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs {CHROMIUM}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def watch(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Open pages that are watched; after the test none may have logged an error or asked anyone else."""
    with ExitStack() as stack:
        opened: list[Watched] = []

        def start(url: str, *, width: int = 1440, theme: str = "light") -> Watched:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
            stack.callback(context.close)
            opened.append(Watched(context.new_page(), url))
            return opened[-1]

        yield start
        assert [error for item in opened for error in item.errors] == []
        assert [url for item in opened for url in item.strangers] == []


@pytest.fixture
def shots(request: pytest.FixtureRequest) -> Path:
    """Where screenshots are kept for a person to look at."""
    folder = Path(request.config.rootpath) / "test-artifacts" / "dashboard"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
