"""What the tables of a run hold, as frozen columns and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

NO_GRADIENT = -1.0
"""Stands in a param_amax matrix where a parameter had no gradient."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of run.json's tensors table: what a tensor id of the samples means.

    `kind` is one of schema.KINDS; `fqn` the module or parameter; `op` the autograd node, empty for parameters and
    activations; `parents` the tensors this gradient was computed from, nearer to the loss; `exact` marks gradients
    copied from a parent without rounding; `file` and `line` are the user's line that made it in the forward, where it
    was seen.
    """

    id: int
    kind: str
    fqn: str
    module: str = ""
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    parents: tuple[int, ...] = ()
    exact: bool = False
    trainable: bool = True
    file: str | None = None
    line: int | None = None

    @property
    def label(self) -> str:
        """Name unique enough to show: the fqn, and the operation where a module has several."""
        return f"{self.fqn} [{self.op}]" if self.op and self.kind == "op_grad" else self.fqn

    @property
    def described(self) -> str:
        """The tensor in a sentence: "3 (ReLU)", "Softmax in blocks.0.attn", "head.weight"."""
        if self.kind == "output_grad" and self.module and self.module != self.fqn:
            return f"{self.fqn} ({self.module})"
        if self.kind == "op_grad" and self.op != "ToCopy":
            return f"{self.op} in {self.fqn}"
        return self.fqn


@dataclass(frozen=True, slots=True)
class Steps:
    """Columns of the step table, one entry per attempted optimizer update, in order.

    All arrays have shape [steps]. Floats are NaN and integers -1 where the run holds null; `found_inf`,
    `loss_finite`, `input_finite`, `scaled_loss_finite` and `traced` are 1, 0 or -1 (unknown). `param_amax` and
    `nonfinite` are ragged lists, see `param_matrix`; so are `weights_nonfinite` and `buffers_nonfinite`, with None
    where nobody looked.
    """

    step: np.ndarray
    time_s: np.ndarray
    optimizer: np.ndarray
    scaler: np.ndarray
    update: np.ndarray
    scale: np.ndarray
    growth_tracker: np.ndarray
    found_inf: np.ndarray
    skipped: np.ndarray
    loss: np.ndarray
    loss_finite: np.ndarray
    input_finite: np.ndarray
    num_micro_steps: np.ndarray
    sampled: np.ndarray
    scaled: np.ndarray
    param_amax: list[np.ndarray]
    nonfinite: list[np.ndarray]
    scaled_loss_finite: np.ndarray
    weights_nonfinite: list[np.ndarray | None]
    buffers_nonfinite: list[np.ndarray | None]
    traced: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    def param_matrix(self, optimizer: int) -> tuple[np.ndarray, np.ndarray]:
        """Largest gradient magnitude of every parameter of one optimizer.

        Returns:
            (rows, amax): indices into these columns, shape [n]; magnitudes, shape [n, parameters], scaled where
            `scaled` is set, inf or NaN where the gradient held one, `NO_GRADIENT` where there was none.
        """
        rows = np.flatnonzero(self.optimizer == optimizer)
        width = max((len(self.param_amax[row]) for row in rows), default=0)
        amax = np.full((len(rows), width), NO_GRADIENT)
        for i, row in enumerate(rows):
            amax[i, : len(self.param_amax[row])] = self.param_amax[row]
        return rows, amax


@dataclass(frozen=True, slots=True)
class Samples:
    """Columns of the sample table: one entry per (step, tensor).

    Arrays have shape [rows]; `counts` has shape [rows, NUM_BINS] and is all zero where no histogram was kept.
    `amax` is the largest finite magnitude, still carrying `scale` where `scaled` is set; `noise_gain` is NaN where the
    run holds none.
    """

    step: np.ndarray
    tensor: np.ndarray
    scale: np.ndarray
    scaled: np.ndarray
    order: np.ndarray
    numel: np.ndarray
    num_zero: np.ndarray
    num_nan: np.ndarray
    num_inf: np.ndarray
    amax: np.ndarray
    noise_gain: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    def select(self, mask: np.ndarray) -> Samples:
        """Rows of a boolean mask or an index array."""
        return Samples(*(getattr(self, field.name)[mask] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operation of a traced forward, or ("input") a tensor that was there before; see schema.OPS.

    `inputs` are the `order`s of the rows that made its tensor arguments, within the same step. `amax` is the largest
    finite magnitude of the output; `amax_fp32` the largest magnitude when computed in FP32 from the same inputs, None
    where that was not done.
    """

    step: int
    micro_step: int
    order: int
    op: str
    module: str
    module_class: str
    file: str | None
    line: int | None
    dtype: str
    shape: tuple[int, ...]
    numel: int
    amax: float
    num_nan: int
    num_posinf: int
    num_neginf: int
    amax_fp32: float | None
    num_masked_rows: int | None
    inputs: tuple[int, ...]
    constants: tuple[float, ...]
    sequence: int | None
    autocast: bool

    @property
    def is_finite(self) -> bool:
        """Whether every element of the output is."""
        return self.num_nan + self.num_posinf + self.num_neginf == 0

    @property
    def name(self) -> str:
        """The operation without name space and overload: "mul" of "aten.mul.Tensor", "relu" of "aten.relu_.default"."""
        parts = self.op.split(".")
        return (parts[1] if len(parts) > 1 else parts[0]).strip("_")


def only(samples: Samples, tensors: Sequence[TensorInfo], kinds: tuple[str, ...]) -> Samples:
    """Rows whose tensor is of one of `kinds`."""
    wanted = np.array([tensor.kind in kinds for tensor in tensors], dtype=bool)
    return samples.select(wanted[samples.tensor] if len(samples) else np.zeros(0, dtype=bool))
