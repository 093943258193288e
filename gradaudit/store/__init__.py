"""The run folder: one writer inside the training process, any number of readers anywhere."""

from gradaudit.store.reader import Run, Samples, Steps, TensorInfo, find_runs, is_run, open_run

__all__ = ["Run", "Samples", "Steps", "TensorInfo", "find_runs", "is_run", "open_run"]
