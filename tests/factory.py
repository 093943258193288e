"""Synthetic runs, written by the real writer without torch, to test analysis and pages on runs of any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gradaudit.formats import MAX_EXPONENT, MIN_EXPONENT, NUM_BINS
from gradaudit.schema import RUN_FORMAT, SCHEMA_VERSION
from gradaudit.store.writer import RunWriter


def tensor(id: int, fqn: str, kind: str = "output_grad", **more: Any) -> dict[str, Any]:
    """A row of the tensors table; FP16 and without parents unless said."""
    return {
        "id": id, "kind": kind, "fqn": fqn, "module": "Linear", "op": "", "shape": [8, 8], "dtype": "float16",
        "parents": [], "exact": False, "trainable": True, **more,
    }  # fmt: skip


def meta(tensors: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """run.json of a finished FP16 run with one optimizer and one GradScaler."""
    params = [row["id"] for row in tensors or [] if row["kind"] == "param_grad"]
    return {
        "format": RUN_FORMAT, "schema_version": SCHEMA_VERSION, "gradaudit_version": "0.1.0", "torch_version": "2.13.0",
        "python_version": "3.11.7", "argv": ["train.py"], "started_at": 1.0, "heartbeat_at": 1.0, "host": "", "pid": 0,
        "rank": 0, "world_size": 1, "settings": {"every": 1, "include": [], "exclude": [], "budget": None},
        "scalers": [scaler()], "optimizers": [{"id": 0, "class": "SGD", "params": params, "resumed": False}],
        "autocast": [{"device": "cpu", "dtype": "float16", "enabled": True}], "tensors": tensors or [],
        "ended": "ok", "exception": None, "errors": [], "drops": {"sampled_steps": 0}, **more,
    }  # fmt: skip


def scaler(**more: Any) -> dict[str, Any]:
    """A scaler's settings, torch's defaults unless said."""
    return {
        "id": 0, "class": "GradScaler", "enabled": True, "init_scale": 65536.0, "growth_factor": 2.0,
        "backoff_factor": 0.5, "growth_interval": 2000, "loaded": False, **more,
    }  # fmt: skip


def step(index: int, **more: Any) -> dict[str, Any]:
    """One applied step at 2^16 with a finite loss."""
    return {
        "step": index, "time_s": 0.1 * index, "optimizer": 0, "scaler": 0, "update": index, "scale": 65536.0,
        "growth_tracker": index, "found_inf": False, "skipped": False, "loss": 1.0, "loss_finite": True,
        "input_finite": True, "num_micro_steps": 1, "sampled": True, "param_amax": [], "scaled": True, "nonfinite": [],
        **more,
    }  # fmt: skip


def sample(index: int, tensor_id: int, exponents: dict[int, int], **more: Any) -> dict[str, Any]:
    """One histogram: {exponent at the recorded scale: elements}."""
    counts = np.zeros(NUM_BINS, dtype=np.int64)
    for exponent, count in exponents.items():
        counts[min(max(exponent, MIN_EXPONENT), MAX_EXPONENT) - MIN_EXPONENT] += count
    num_zero, num_nan, num_inf = (more.pop(key, 0) for key in ("num_zero", "num_nan", "num_inf"))
    amax = 1.5 * 2.0 ** max(exponents) if exponents else 0.0
    return {
        "step": index, "tensor": tensor_id, "scale": 65536.0, "scaled": True, "order": tensor_id, "num_micro_steps": 1,
        "numel": int(counts.sum()) + num_zero + num_nan + num_inf, "num_zero": num_zero, "num_nan": num_nan,
        "num_inf": num_inf, "amax": amax, "noise_gain": None, "counts": counts.tolist(), **more,
    }  # fmt: skip


def event(seq: int, name: str, **more: Any) -> dict[str, Any]:
    """One call of the call-order log, at step 0 on line 10 unless said."""
    return {
        "seq": seq, "step": 0, "micro_step": 0, "name": name, "optimizer": None, "scaler": None, "scaled": None,
        "optimizers": None, "file": "train.py", "line": 10, "raised": None, "detail": None, **more,
    }  # fmt: skip


def op(order: int, name: str, *, inputs: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    """One finite FP16 operation of a traced forward, in the model's own code unless said: `op(0, "mul.Tensor")`."""
    return {
        "step": 0, "micro_step": 0, "order": order, "op": name if name == "input" else f"aten.{name}", "module": "Net",
        "module_class": "Net", "file": "train.py", "line": 10, "dtype": "float16", "shape": [8, 8], "numel": 64,
        "amax": 1.0, "num_nan": 0, "num_posinf": 0, "num_neginf": 0, "amax_fp32": 1.0, "num_masked_rows": None,
        "inputs": list(inputs), "constants": [], "sequence": None, "autocast": True, **more,
    }  # fmt: skip


def write_run(
    path: Path,
    *,
    run_meta: dict[str, Any] | None = None,
    steps: list[dict[str, Any]] | None = None,
    samples: list[dict[str, Any]] | None = None,
    events: list[dict[str, Any]] | None = None,
    ops: list[dict[str, Any]] | None = None,
    flush_every: int | None = None,
) -> Path:
    """Write a run folder; `flush_every` steps a part, one part otherwise."""
    writer = RunWriter(path, rank=0, meta=run_meta or meta())
    steps = steps or []
    chunk = flush_every or max(len(steps), 1)
    for start in range(0, max(len(steps), 1), chunk):
        window = steps[start : start + chunk]
        last = start + chunk >= len(steps)
        bounds = (window[0]["step"], window[-1]["step"]) if window else (0, -1)
        writer.append("steps", window)
        inside = [s for s in samples or [] if s["step"] >= bounds[0] and (last or s["step"] <= bounds[1])]
        writer.append("samples", inside)
        writer.flush()
    writer.append("events", events or [])
    writer.append("ops", ops or [])
    writer.flush()
    return path
