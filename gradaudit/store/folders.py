"""Where a run goes when nobody said where."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from gradaudit.errors import CaptureError

DEFAULT_FOLDER = Path("gradaudit-runs")


def default_folder(script: str) -> Path:
    """gradaudit-runs/<script>-<date>-<time>, with a number behind it should that exist.

    Raises:
        CaptureError: Several ranks would each make up a name of their own.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CaptureError("With several ranks the run folder has to be given: pass --out DIR.")
    name = f"{Path(script).stem or 'session'}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder, counter = DEFAULT_FOLDER / name, 2
    while folder.exists():
        folder, counter = DEFAULT_FOLDER / f"{name}-{counter}", counter + 1
    return folder
