"""Draw the pictures of README.md and docs/ from sample_runs/: `make screenshots`."""

from __future__ import annotations

import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from gradaudit_dashboard.serve import address, bind, close

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

PICTURES = (
    ("overview-light.png", "/r/empty_window", "light", 1440, 1000),
    ("pictures-dark.png", "/r/gradient_underflow", "dark", 1440, 2300),
    ("runs.png", "/", "light", 1440, 640),
)


def main() -> None:
    """Serve the sample runs and photograph a few pages."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    server = bind(ROOT / "sample_runs", "127.0.0.1", 0)
    threading.Thread(target=server.run, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS))
        for name, path, scheme, width, height in PICTURES:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(address(server).rstrip("/") + path)
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(1500)  # plotly draws after the last request
            page.screenshot(path=IMAGES / name)
            page.close()
        browser.close()
    close(server)


if __name__ == "__main__":
    main()
