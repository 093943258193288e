"""The run folder: one writer inside the training process, any number of readers anywhere.

The reader is imported when it is first asked for: a training process only writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradaudit.store.reader import Run as Run
    from gradaudit.store.reader import find_runs as find_runs
    from gradaudit.store.reader import is_run as is_run
    from gradaudit.store.reader import open_run as open_run
    from gradaudit.store.tables import Samples as Samples
    from gradaudit.store.tables import Steps as Steps
    from gradaudit.store.tables import TensorInfo as TensorInfo

__all__ = ["Run", "Samples", "Steps", "TensorInfo", "find_runs", "is_run", "open_run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from gradaudit.store import reader

        return getattr(reader, name)
    raise AttributeError(f"module 'gradaudit.store' has no attribute {name!r}")
