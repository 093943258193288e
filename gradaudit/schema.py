"""The run folder's contract, imported by the writer and by the reader.

A run is a folder: run.json (who, how, which tensors) and, per rank, Parquet parts of four tables. docs/run-format.md
explains every column. Adding a column needs no new version; changing what one means does.
"""

from __future__ import annotations

import pyarrow as pa

RUN_FORMAT = "gradaudit-run"
SCHEMA_VERSION = 1
RUN_FILE = "run.json"

STEPS = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("time_s", pa.float64(), nullable=False),
        pa.field("optimizer", pa.int32(), nullable=False),
        pa.field("scaler", pa.int32()),  # null: no (enabled) scaler handled this step
        # index of the scaler.update() that closed it: steps of one update share a scale
        pa.field("update", pa.int64()),
        pa.field("scale", pa.float64(), nullable=False),  # 1.0 without a scaler
        pa.field("growth_tracker", pa.int32()),
        pa.field("found_inf", pa.bool_()),
        pa.field("skipped", pa.bool_(), nullable=False),
        pa.field("loss", pa.float64()),  # unscaled, mean over the step's backward calls
        pa.field("loss_finite", pa.bool_()),
        pa.field("input_finite", pa.bool_()),
        pa.field("num_micro_steps", pa.int32(), nullable=False),
        pa.field("sampled", pa.bool_(), nullable=False),
        # one value per entry of run.json optimizers[optimizer].params, scaled as the gradient was at the boundary:
        # the largest magnitude; inf or nan when the gradient held one; null when there was no gradient
        pa.field("param_amax", pa.list_(pa.float32()), nullable=False),
        pa.field("scaled", pa.bool_(), nullable=False),  # whether param_amax still carries the scale
        pa.field("nonfinite", pa.list_(pa.int32()), nullable=False),  # ids of the tensors whose gradient was non-finite
        # whether what scaler.scale returned was finite; looked at only where it is FP16, else null
        pa.field("scaled_loss_finite", pa.bool_()),
        # ids of kind "param" whose weights were non-finite when the step opened; null where that was not looked at
        pa.field("weights_nonfinite", pa.list_(pa.int32())),
        # ids of kind "buffer" that were finite at first sight and no longer when the step closed; null: not looked at
        pa.field("buffers_nonfinite", pa.list_(pa.int32())),
        pa.field("traced", pa.bool_()),  # whether the ops table holds the whole forward of this step
    ]
)

SAMPLES = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("tensor", pa.int32(), nullable=False),
        pa.field("scale", pa.float64(), nullable=False),
        pa.field("scaled", pa.bool_(), nullable=False),
        pa.field("order", pa.int32(), nullable=False),  # position in backward (or in forward, for outputs)
        pa.field("num_micro_steps", pa.int32(), nullable=False),
        pa.field("numel", pa.int64(), nullable=False),
        pa.field("num_zero", pa.int64(), nullable=False),
        pa.field("num_nan", pa.int64(), nullable=False),
        pa.field("num_inf", pa.int64(), nullable=False),
        pa.field("amax", pa.float64(), nullable=False),  # largest finite magnitude, 0 when there is none
        # fan-in times the mean square of the layer's input: the energy that independent errors of the output gradient
        # bring to this weight gradient, per unit of theirs; null where it is not a layer's weight
        pa.field("noise_gain", pa.float64()),
        pa.field("counts", pa.list_(pa.int64())),  # NUM_BINS counts of floor(log2 |x|); null for kind "output"
    ]
)

EVENTS = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("micro_step", pa.int32(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("optimizer", pa.int32()),
        pa.field("scaler", pa.int32()),
        pa.field("scaled", pa.bool_()),  # whether that optimizer's gradients carried the scale at that moment
        pa.field("optimizers", pa.list_(pa.int32())),  # whose gradients the call changed or got; null where unknown
        pa.field("file", pa.string()),  # the user's line
        pa.field("line", pa.int32()),
        pa.field("raised", pa.string()),  # "Type: first line" of what the call raised
        pa.field("detail", pa.string()),  # JSON, see docs/run-format.md
    ]
)

OPS = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("micro_step", pa.int32(), nullable=False),
        pa.field("order", pa.int32(), nullable=False),  # execution order within the step, from 0
        # "aten.mul.Tensor"; "input" for what was there before: the batch, a parameter, a buffer
        pa.field("op", pa.string(), nullable=False),
        pa.field("module", pa.string(), nullable=False),  # whose code ran, "loss" outside every module; an input's name
        pa.field("module_class", pa.string(), nullable=False),  # for an input: param, buffer, grad, batch or other
        pa.field("file", pa.string()),
        pa.field("line", pa.int32()),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("numel", pa.int64(), nullable=False),
        pa.field("amax", pa.float64(), nullable=False),  # largest finite magnitude, 0 when there is none
        pa.field("num_nan", pa.int64(), nullable=False),
        pa.field("num_posinf", pa.int64(), nullable=False),
        pa.field("num_neginf", pa.int64(), nullable=False),
        # largest magnitude of the same operation computed in FP32 from the same inputs; null where that was not done
        pa.field("amax_fp32", pa.float64()),
        pa.field("num_masked_rows", pa.int64()),  # rows of a softmax's input that hold nothing but -inf
        pa.field("inputs", pa.list_(pa.int32()), nullable=False),  # `order` of the rows that made its tensor arguments
        pa.field("constants", pa.list_(pa.float64()), nullable=False),  # its numeric arguments
        pa.field("sequence", pa.int64()),  # number of its autograd node, null without one
        pa.field("autocast", pa.bool_(), nullable=False),  # whether it ran inside an enabled autocast region
    ]
)

TABLES = {"steps": STEPS, "samples": SAMPLES, "events": EVENTS, "ops": OPS}

SORT_KEYS = {"steps": ("step",), "samples": ("tensor", "step"), "events": ("seq",), "ops": ("step", "order")}

KINDS = ("output_grad", "op_grad", "param_grad", "output", "param", "buffer", "update")


def rank_dir(rank: int) -> str:
    """Folder name of one rank: rank-00000."""
    return f"rank-{rank:05d}"


def part_name(table: str, index: int) -> str:
    """File name of one part: samples-000000.parquet."""
    return f"{table}-{index:06d}.parquet"
