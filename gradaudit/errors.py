"""What callers may catch.

GradauditError
 |- RunNotFound      the path is not a run folder
 |- RunCorrupt       the folder is a run, a file in it cannot be read
 |- SchemaMismatch   the run was written by a newer gradaudit
 |- RunExists        the folder already holds a run and may not be overwritten
 +- CaptureError     recording cannot start (unwritable folder, already attached)

Every message is one sentence that names the path or value and the next step.
"""

from __future__ import annotations


class GradauditError(Exception):
    """Base of every error gradaudit raises on purpose."""


class RunNotFound(GradauditError):
    """The path is not a run folder."""


class RunCorrupt(GradauditError):
    """A file of the run cannot be read."""


class SchemaMismatch(GradauditError):
    """The run was written by a newer gradaudit than this one."""


class RunExists(GradauditError):
    """The folder already holds a run."""


class CaptureError(GradauditError):
    """Recording cannot start."""
