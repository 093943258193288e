"""A name for this machine that says nothing about it."""

from __future__ import annotations

import hashlib
import platform


def host_id() -> str:
    """Short digest of the host name: written to a run so that a reader knows whether its pid is one of ours."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]
