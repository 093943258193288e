"""Builds the Dash application for a folder; nothing happens at import time and nothing is global."""

from __future__ import annotations

import os
from pathlib import Path

from dash import Dash

from gradaudit_dashboard import callbacks, layout, security
from gradaudit_dashboard.source import Source


def create_app(path: str | os.PathLike[str]) -> Dash:
    """The dashboard of one run folder or of a folder of runs.

    `create_app(path).server` is the WSGI application. Nothing is read before the first page is asked for.

    Args:
        path: A run folder, or a folder that holds runs up to two levels below.
    """
    source = Source(Path(path))
    app = Dash(
        __name__,
        assets_folder=str(Path(__file__).with_name("assets")),
        title="gradaudit",
        update_title="",
        index_string=layout.INDEX,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
        serve_locally=True,
        # pages come and go, so ids of the other pages are unknown at any moment
        suppress_callback_exceptions=True,
        use_pages=False,
        pages_folder="",
        compress=False,
        add_log_handler=False,
        enable_mcp=False,
        health_endpoint="healthz",
        on_error=callbacks.on_error,
    )
    app.layout = layout.shell()
    callbacks.register(app, source)
    security.protect(app)
    return app
