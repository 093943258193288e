"""gradaudit: a diagnostic profiler and gradient auditor for FP16 training in PyTorch."""

__version__ = "0.1.0"
