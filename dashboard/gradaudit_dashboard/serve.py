"""Serves the dashboard on this machine with waitress: one process, one shared cache, no debugger."""

from __future__ import annotations

import errno
import logging
import os
import socket
import webbrowser
from pathlib import Path
from typing import Any

from waitress.server import create_server

from gradaudit.errors import GradauditError, RunNotFound
from gradaudit.store import find_runs
from gradaudit_dashboard.app import create_app

LOOPBACK = ("127.0.0.1", "localhost", "::1")

NUM_THREADS = 8
"""A browser opens six connections, and a slow panel may hold some of them."""

SHUTDOWN_S = 0.5
"""How long Ctrl-C waits for answers under way; their threads are daemons and end with the process."""


def serve(path: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 8050, open_browser: bool = True) -> None:
    """Serve until Ctrl-C, printing the address first.

    Args:
        path: A run folder or a folder of runs.
        host: A loopback address.
        port: TCP port; 0 takes a free one.
        open_browser: Whether to open the address in the default browser.

    Raises:
        GradauditError: No run there, an address that others could reach, or a port in use.
    """
    require_runs(Path(path))
    server = bind(path, host, port)
    url = address(server)
    print(f"gradaudit dashboard of {path}: {url} (Ctrl-C ends it)", flush=True)
    if open_browser:
        webbrowser.open(url)
    try:
        server.asyncore.loop(timeout=0.5, map=server._map)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        close(server)


def require_runs(path: Path) -> None:
    """Say what is missing before a server starts.

    Raises:
        RunNotFound: `path` does not exist, is no folder or holds no run.
    """
    record = "record one with: gradaudit run train.py"
    if not path.exists():
        raise RunNotFound(f"{path} does not exist; pass a run folder or a folder of runs, or {record}")
    if not path.is_dir():
        raise RunNotFound(f"{path} is a file; pass the run folder or a folder of runs.")
    if not find_runs(path):
        raise RunNotFound(f"{path} holds no gradaudit run; pass another folder, or {record}")


def bind(path: str | os.PathLike[str], host: str, port: int) -> Any:
    """A waitress server that listens but does not answer yet; `address` says where.

    Raises:
        GradauditError: The address is not this machine's own, or the port is in use.
    """
    if host not in LOOPBACK:
        raise GradauditError(
            f"--host {host} would show the runs to others without a password; use 127.0.0.1 and, from another machine, "
            f"ssh -L {port or 8050}:127.0.0.1:{port or 8050}."
        )
    listener = _listen(host, port)
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a busy moment is no news
    return create_server(create_app(path).server, sockets=[listener], threads=NUM_THREADS, ident=None)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise GradauditError(f"Port {port} on {host} is in use; pass --port 0 for a free one.") from error
        reason = error.strerror or str(error)
        raise GradauditError(f"Cannot listen on {host}:{port} ({reason}); choose another --port.") from error


def address(server: Any) -> str:
    """URL of a bound server."""
    host = server.effective_host
    return f"http://{f'[{host}]' if ':' in host else host}:{server.effective_port}/"


def close(server: Any) -> None:
    """Stop answering."""
    server.task_dispatcher.shutdown(timeout=SHUTDOWN_S)
    server.close()
