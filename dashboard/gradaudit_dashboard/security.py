"""Answers this machine's browser only, and tells it to load nothing from anywhere else.

A page on the internet can make its visitor's browser call 127.0.0.1: by a name that resolves there (the Host header
then holds that name) or across origins (the Origin header then holds its own).
"""

from __future__ import annotations

from dash import Dash
from flask import Response, abort, request
from werkzeug.exceptions import HTTPException

HOSTS = ("127.0.0.1", "localhost", "[::1]")

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "SAMEORIGIN",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def protect(app: Dash) -> None:
    """Check every request and set the headers of every answer; call it after the last callback is registered."""
    policy = content_policy(app.csp_hashes())

    @app.server.before_request
    def refuse_strangers() -> None:
        port = request.environ.get("SERVER_PORT", "80")
        allowed = {f"{host}:{port}" for host in HOSTS} | (set(HOSTS) if port == "80" else set())
        if request.headers.get("Host", "") not in allowed:
            abort(Response("This dashboard answers on 127.0.0.1 and localhost only.", 403, mimetype="text/plain"))
        origin = request.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in allowed:
            abort(Response("This dashboard answers its own pages only.", 403, mimetype="text/plain"))

    @app.server.after_request
    def add_headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response

    @app.server.errorhandler(Exception)
    def without_trace(error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return error.get_response()  # type: ignore[return-value]
        app.server.logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return Response("Not found.", 404, mimetype="text/plain")


def content_policy(script_hashes: list[str] | tuple[str, ...]) -> str:
    """Content-Security-Policy: everything from this server, inline scripts by hash, no eval."""
    return "; ".join(
        (
            "default-src 'self'",
            f"script-src 'self' {' '.join(script_hashes)}".rstrip(),
            "style-src 'self' 'unsafe-inline'",  # Mantine and plotly set style attributes
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'self'",
        )
    )
