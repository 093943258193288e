"""One batch once more, and what that says: `probe` at several loss scales, `replay_batch` from a saved file."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gradaudit.analysis.batch import BatchReplay, ReplayPass, conclude_replay, first_bad
from gradaudit.analysis.probe import ProbeResult, ProbeRow, conclude
from gradaudit.capture.guard import one_line
from gradaudit.capture.names import unwrap
from gradaudit.capture.reading import floating_tensors
from gradaudit.capture.recording import Recording, nothing_recorded
from gradaudit.capture.registry import Known
from gradaudit.capture.rerun.batches import BATCH_FORMAT, BATCH_VERSION
from gradaudit.capture.rerun.probe import backward, scaled_by, steps_forbidden, try_scales
from gradaudit.capture.rerun.state import keep, set_random_state
from gradaudit.capture.settings import CaptureSettings
from gradaudit.errors import GradauditError, RunCorrupt, RunNotFound, SchemaMismatch
from gradaudit.store import open_run
from gradaudit.store.tables import OpRow


def probe(known: Known, closure: Callable[[], torch.Tensor], scales: Sequence[float] | None) -> ProbeResult:
    """What `Audit.probe` does, with what a recording has met.

    Raises:
        RuntimeError: The closure stepped an optimizer, or stepped or updated a scaler.
        ValueError: It returned no loss, or a scale is not a positive number.

    Sync: waits for the device at every scale.
    """
    for scale in scales or ():
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"A scale is {scale}; each must be a finite number above 0.")
    found = None
    with nothing_recorded(), keep(known.models, [param for _, param in known.params], known.scalers):
        in_force = [float(scaler.get_scale()) for scaler in known.scalers if scaler.is_enabled()]
        passes = try_scales(closure, known.params, scales)
        if not passes[0].loss_finite:
            with steps_forbidden(), _traced(known.models) as ops:
                closure()
            found = first_bad(ops)
    return conclude(
        tuple(ProbeRow(**asdict(one)) for one in passes),
        scale_in_force=in_force[0] if len(in_force) == 1 else None,
        first_bad=None if found is None else found.sentence,
    )


def replay_batch(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    step: int | None = None,
) -> BatchReplay:
    """Run a batch that `save_batch` kept once more, as it was and in FP32: where did it fail, and is it FP16's fault?

    The weights, buffers, random numbers and autocast of the recording are used; the model is as before afterwards.
    In FP32, parameters and arguments in half are widened and autocast is off; what the model casts to half by hand
    stays so.

    Example:
        replay = gradaudit.replay_batch("runs/a", model, lambda output: criterion(output, target))
        print(replay.verdict)

    Args:
        path: A run folder, or one saved batch.
        model: Of the same class and shape as the one that was trained; its weights do not matter.
        loss: Makes the loss of the model's output. None: only the forward is run.
        step: Which of a run's batches; by default the first that was saved.

    Raises:
        RunNotFound: There is no such file, or the run holds no batch of that step.
        RunCorrupt: The file cannot be read.
        SchemaMismatch: It was written by a newer gradaudit.
        GradauditError: The weights do not fit the model, or an argument could not be saved.

    Sync: waits for the device.
    """
    file = _find(Path(path), step)
    saved = _load(file)
    model = unwrap(model)
    index = _fitting(saved["models"], model, file)
    calls = [call for call in saved["calls"] if call["model"] == index]
    for call in calls:
        if call["left_out"]:
            raise GradauditError(
                f"{file} lacks {call['left_out'][0]}, which is neither a tensor nor a plain value and was not saved; "
                "this forward cannot be replayed."
            )
    state, recorded_on = saved["models"][index]["state"], saved["models"][index]["device"]

    def run(regions: Callable[[dict[str, Any]], ExitStack], cast: Callable[[torch.Tensor], torch.Tensor]) -> ReplayPass:
        return _run(model, calls, loss, saved["scale"], regions, cast)

    with nothing_recorded(), keep([model], (), ()), steps_forbidden():
        _fill(model, state)
        with _traced([model]) as ops:
            recorded = run(lambda call: _regions(call["autocast"], recorded_on, _device(model)), lambda tensor: tensor)
        _fill(model, state)
        with _widened(model):
            fp32 = run(lambda _: ExitStack(), _widen)
    return conclude_replay(
        file=str(file),
        step=saved["step"],
        scale=saved["scale"],
        recorded=recorded,
        fp32=fp32,
        first_bad=first_bad(ops),
        nonfinite_inputs=tuple(_nonfinite_inputs(calls)),
        nonfinite_weights=tuple(name for name, tensor in state.items() if not _is_finite(tensor)),
    )


def _find(path: Path, step: int | None) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise RunNotFound(f"{path} does not exist; pass a run folder or a saved batch.")
    files = {
        int(file.stem.removeprefix("batch-")): file for file in sorted(path.glob("rank-*/batch-*.pt"), reverse=True)
    }
    if not files:
        raise RunNotFound(f"{path} holds no saved batch; record again with --save-batch, which keeps one that fails.")
    if step is not None and step not in files:
        held = ", ".join(map(str, sorted(files)))
        raise RunNotFound(f"{path} holds no batch of step {step}; it holds those of {held}.")
    return files[min(files) if step is None else step]


def _load(file: Path) -> dict[str, Any]:
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RunCorrupt(f"{file} cannot be read ({one_line(error)}); pass another batch.") from error
    if not isinstance(saved, dict) or saved.get("format") != BATCH_FORMAT:
        raise RunCorrupt(f"{file} is no saved batch; pass one that --save-batch wrote.")
    if saved["version"] > BATCH_VERSION:
        raise SchemaMismatch(f"{file} was written by a newer gradaudit; update gradaudit to replay it.")
    return saved


def _fitting(models: Sequence[dict[str, Any]], model: torch.nn.Module, file: Path) -> int:
    """Which of the saved models has this one's parameters and buffers."""
    ours = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _named_tensors(model)}
    differing = []
    for index, saved in enumerate(models):
        theirs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved["state"].items()}
        if ours == theirs:
            return index
        differing.append(sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)))
    closest = min(range(len(models)), key=lambda index: len(differing[index]))
    raise GradauditError(
        f"The model does not fit {file}: {differing[closest][0]} is not as in the {models[closest]['class']} that was "
        "saved; pass a model built as it was in training."
    )


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _fill(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in _named_tensors(model):
        tensor.data.copy_(state[name])


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _run(
    model: torch.nn.Module,
    calls: Sequence[dict[str, Any]],
    loss: Callable[[Any], torch.Tensor] | None,
    scale: float,
    regions: Callable[[dict[str, Any]], ExitStack],
    cast: Callable[[torch.Tensor], torch.Tensor],
) -> ReplayPass:
    """The calls of a step in order, to the first that fails."""
    device, params = _device(model), list(model.named_parameters())
    losses: list[float] = []
    gradients_finite = None
    for call in calls:
        args, kwargs = (_mapped(call[key], lambda x: cast(x.to(device))) for key in ("args", "kwargs"))
        for name, part in model.named_modules():
            part.training = name in call["training"]
        set_random_state(call["random"])
        try:
            with torch.enable_grad(), regions(call):
                output = model(*args, **kwargs)
                value = None if loss is None else loss(output)
        except Exception as error:  # a check of the script's own, most often: what it was about is in the trace
            return ReplayPass(False, raised=one_line(error))
        with _disable_current_modes():  # no part of what is traced
            finite = all(_is_finite(tensor) for tensor in floating_tensors((output, value)))
            losses += [] if value is None else [float(value.detach().double().mean())]
        if not finite:
            return ReplayPass(False, _mean(losses))
        if value is not None:
            first = backward(scaled_by(value, scale), params).first_nonfinite
            gradients_finite = not first
            if first:
                return ReplayPass(True, _mean(losses), False, first)
    return ReplayPass(True, _mean(losses), gradients_finite)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _is_finite(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor.detach()).all())


def _nonfinite_inputs(calls: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Arguments that hold what no mask is made of: NaN or +inf."""
    for call in calls:
        named = [(f"argument {i + 1}", value) for i, value in enumerate(call["args"])]
        named += [(f"argument {name}", value) for name, value in call["kwargs"].items()]
        for name, value in named:
            if any(bool((x.isnan() | x.isposinf()).any()) for x in floating_tensors(value) if not x.is_complex()):
                yield name


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value.detach()).requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _regions(states: Sequence[dict[str, Any]], recorded_on: str, device: torch.device) -> ExitStack:
    """Autocast as it was around the forward; on another kind of device as it was for the recorded one."""
    by_device = {state["device"]: state for state in states}
    by_device[device.type] = by_device[recorded_on]
    regions = ExitStack()
    for kind, state in by_device.items():
        if kind in ("cpu", device.type):
            regions.enter_context(torch.autocast(kind, dtype=getattr(torch, state["dtype"]), enabled=state["enabled"]))
    return regions


@contextmanager
def _widened(model: torch.nn.Module) -> Iterator[None]:
    """The model in FP32, with every autocast region off, also those that its own code enters."""
    cls: Any = torch.amp.autocast_mode.autocast
    enter = cls.__enter__

    def enter_disabled(self: Any) -> Any:
        self._enabled = False
        return enter(self)

    halves = [(param, param.data) for param in model.parameters() if _widen(param.data) is not param.data]
    cls.__enter__ = enter_disabled
    try:
        for param, values in halves:
            param.grad, param.data = None, values.float()
        for part in model.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else _widen(buffer)
        with torch.autocast(_device(model).type), torch.autocast("cpu"):
            yield
    finally:
        cls.__enter__ = enter
        for param, values in halves:
            param.grad, param.data = None, values


@contextmanager
def _traced(models: Sequence[torch.nn.Module]) -> Iterator[list[OpRow]]:
    """Every operation of the forward inside, in the list that is handed out, once the block is over."""
    ops: list[OpRow] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = CaptureSettings(origin="always")
        recording = Recording(Path(folder) / "run", settings, argv=(), force=False)
        try:
            for model in models:
                recording.introduce(model, None, None)
            yield ops
        finally:
            # as if it had failed: what came before a step is kept only then
            recording.close(GradauditError("no step follows"))
            ops += open_run(Path(folder) / "run").ops()
