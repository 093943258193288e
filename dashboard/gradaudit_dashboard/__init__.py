"""gradaudit's pages in a browser: `create_app` builds them for a folder, `serve` shows them on this machine only.

A request goes through security.py, lands in a callback of callbacks.py, which reads the clamped state (state.py), asks
the cache (source.py), turns arrays into a picture (heat.py, exponents.py, figures.py) or words into cards
(components.py) and returns. What needs no new data (theme, scale slider, pointer, address) is done by assets/*.js.
"""

from gradaudit_dashboard.app import create_app
from gradaudit_dashboard.serve import serve

__all__ = ["create_app", "serve"]
