"""Nothing on the training thread waits for a device: fake CUDA tensors refuse every operation that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from gradaudit.capture import reading
from gradaudit.capture.auditor import Auditor
from gradaudit.capture.names import Names
from gradaudit.capture.patches import install
from gradaudit.capture.reading import largest_each, mean, mean_square, norm_each, stack_rows, stack_scalars
from gradaudit.capture.recorder import Packet, Pending, SampledTensors
from gradaudit.capture.rerun.batches import Batches
from gradaudit.capture.settings import CaptureSettings
from gradaudit.capture.setup import state_facts
from gradaudit.capture.statistic import ROW_WIDTH, tensor_row, update_row
from gradaudit.capture.steps import traced_ops
from gradaudit.capture.trace.opnotes import OpNotes, Surroundings
from gradaudit.capture.trace.opvalues import NUM_VALUES

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn,
    torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available"),
]


class PretendedCopy:
    """A copy to pinned memory needs a real device; what is asked here is only that it starts from one."""

    on_host = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.on_host = tensor.device.type == "cpu"


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reading, "HostCopy", PretendedCopy)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


WAITING: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.amax().item(),
    lambda x: torch.bincount(x.int()),
    lambda x: x.masked_select(x > 0),
    bool,
]

READINGS: list[Callable[[torch.Tensor], Any]] = [
    tensor_row,
    lambda x: largest_each([x, x]),
    lambda x: norm_each([x, x]),
    mean,
    mean_square,
]


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("operation", WAITING)
def test_a_fake_cuda_tensor_refuses_to_be_waited_for(operation: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(1, device="cuda")
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        operation(x)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("read", READINGS)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 6)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_reading_waits_for_a_dense_tensor(
    read: Callable[[torch.Tensor], Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    result = read(torch.empty(shape, device="cuda", dtype=dtype))
    for value in result if isinstance(result, list) else [result]:
        assert value.device.type == "cuda"
        assert value.shape in ((), (ROW_WIDTH,))


@pytest.mark.parametrize("read", READINGS)
@pytest.mark.parametrize("num_dense", [0, 1])
def test_no_reading_waits_for_a_sparse_tensor(read: Callable[[torch.Tensor], Any], num_dense: int) -> None:
    # a meta tensor holds no data either, and unlike a fake one may be sparse and trained without a CUDA build of torch
    indices = torch.zeros((2, 5), dtype=torch.int64, device="meta")
    x = torch.sparse_coo_tensor(indices, torch.empty((5, *(3,) * num_dense), device="meta"), (7, 7, *(3,) * num_dense))
    with pytest.raises(NotImplementedError):
        x.coalesce()
    result = read(x)
    for value in result if isinstance(result, list) else [result]:
        assert value.device.type == "meta"


@pytest.mark.parametrize("operation", WAITING)
def test_a_meta_tensor_refuses_to_be_waited_for(operation: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        operation(torch.ones(1, device="meta"))


class Packets:
    """Stands in for the recorder's thread, which alone may wait."""

    error = None
    num_dropped = 0

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.events: list[dict[str, Any] | Pending] = []

    def put(self, packet: Packet) -> None:
        self.packets.append(packet)

    def put_event(self, event: dict[str, Any] | Pending) -> None:
        self.events.append(event)


class FusedOptimizer(torch.optim.SGD):
    """Takes the scale and found_inf from the scaler as fused optimizers do, so that torch itself need not wait."""

    _step_supports_amp_scaling = True
    _need_device_dtype_check_for_fused = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.9)


@pytest.mark.parametrize("change", ["none", "clip", "clip scaled", "by hand", "by hand on the data", "penalty"])
@pytest.mark.parametrize(("sparse", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
def test_a_whole_training_step_is_observed_without_waiting(
    monkeypatch: pytest.MonkeyPatch, change: str, dtype: torch.dtype, *, sparse: bool
) -> None:
    monkeypatch.setattr(reading, "HostCopy", PretendedCopy)
    auditor, packets = Auditor(CaptureSettings(every=1), {}), Packets()
    auditor.start(packets, Batches(None))  # type: ignore[arg-type]
    uninstall = install(auditor)
    try:
        train_without_data(change, sparse=sparse, dtype=dtype)
        auditor.close_open_steps(failed=False)
    finally:
        uninstall()

    run = auditor.describe()
    assert run["errors"] == []
    assert len(packets.packets) == 3
    assert all(isinstance(packet.samples, SampledTensors) for packet in packets.packets)
    copies = [copy.tensor for packet in packets.packets for copy in packet.scalars]  # type: ignore[attr-defined]
    assert "meta" in {tensor.device.type for tensor in copies}
    kinds = {"output", "output_grad", "op_grad", "param_grad"} | ({"update"} if dtype is torch.bfloat16 else set())
    assert {row["kind"] for row in run["tensors"]} == kinds
    waiting = [event for event in packets.events if isinstance(event, Pending)]
    # whether data were changed behind torch's back only the device knows; where nobody did, too
    assert len(waiting) == {"clip": 6, "clip scaled": 9}.get(change, 3)


def train_without_data(change: str, *, sparse: bool, dtype: torch.dtype) -> None:
    """Three steps under a scaler on meta tensors: torch's own loop has no operation that waits either."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Embedding(10, 8, sparse=sparse),
            torch.nn.Conv1d(4, 4, 3),
            torch.nn.BatchNorm1d(4),
            torch.nn.ReLU(),
            torch.nn.Linear(6, 2),
        ).to(dtype)
    optimizer = FusedOptimizer(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")  # a "cuda" one disables itself on a machine without
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.zeros((5, 4), dtype=torch.int64, device="meta")
        loss = model(tokens).half().square().mean()
        if change == "penalty":
            (grad,) = torch.autograd.grad(scaler.scale(loss), [model[4].weight], create_graph=True)
            loss = loss + grad.square().sum()
        scaler.scale(loss).backward()
        dense = [p for p in model.parameters() if not p.grad.is_sparse]
        if change == "clip":
            scaler.unscale_(optimizer)
        if change.startswith("clip"):
            torch.nn.utils.clip_grad_norm_(dense, 1.0)
        for p in dense:
            if change == "by hand":
                p.grad.mul_(0.5)
            elif change == "by hand on the data":
                p.grad.data.mul_(0.5)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_no_reading_of_weights_and_their_state_waits(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 3, device="cuda", dtype=dtype))
    assert update_row(weight.detach().clone(), weight, weight.detach() != 0).shape == (ROW_WIDTH,)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"main": torch.zeros(4, 3, device="cuda"), "momentum": torch.zeros_like(weight)}
    facts = state_facts(optimizer)
    assert facts is not None
    assert [value.device.type for value in facts.equal] == ["cuda"]


@pytest.mark.usefixtures("fake_cuda")
def test_values_of_one_device_travel_in_one_copy_and_keep_their_order() -> None:
    cuda, cpu = torch.ones((), device="cuda"), torch.ones((), device="cpu")
    assert [copy.tensor.shape[0] for copy in stack_scalars([cuda, cuda, cpu, cuda])] == [2, 1, 1]  # type: ignore[attr-defined]
    rows = [torch.zeros(ROW_WIDTH, dtype=torch.int64, device="cuda")] * 3
    assert [tuple(copy.tensor.shape) for copy in stack_rows(rows)] == [(3, ROW_WIDTH)]  # type: ignore[attr-defined]


def test_a_copy_to_the_host_is_made_there_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradaudit.capture.host_copy import HostCopy

    made: list[torch.Tensor] = []

    class Event:
        def record(self, stream: object) -> None: ...

    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        value = empty(*args, **kwargs)
        made.extend([value] * pin_memory)
        return value

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", unpinned)
    with FakeTensorMode(), torch.device("cuda"):
        HostCopy(torch.ones(3, device="cuda"))
    assert [host.device.type for host in made] == ["cpu"]


aten = torch.ops.aten

OPERATIONS: list[tuple[Any, Callable[[], tuple[Any, ...]]]] = [
    (aten.mul.Tensor, lambda: (half_on_cuda(4, 6), half_on_cuda(4, 6))),
    (aten.add_.Tensor, lambda: (half_on_cuda(4, 6), 1e-9)),
    (aten._softmax.default, lambda: (half_on_cuda(4, 6), -1, False)),
    (aten._to_copy.default, lambda: (torch.empty(4, 6, device="cuda"),)),
    (aten.native_layer_norm.default, lambda: (half_on_cuda(4, 6), [6], None, None, 1e-5)),
    (aten.mul.Tensor, lambda: (half_on_cuda(0, 6), half_on_cuda(0, 6))),
    (aten.var_mean.correction, lambda: (half_on_cuda(4, 6), [1])),
]


def half_on_cuda(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.float16)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize(("operation", "arguments"), OPERATIONS, ids=lambda value: str(value)[:24])
def test_no_reading_of_a_traced_operation_waits(
    operation: Any, arguments: Callable[[], tuple[Any, ...]], *, everything: bool
) -> None:
    notes = OpNotes(Names(), Surroundings(list, lambda device: False), everything=everything)
    args = arguments()
    kwargs = {"dtype": torch.float16} if operation is aten._to_copy.default else {}
    started = notes.start(operation, args, kwargs)
    assert started is not None
    notes.end(started, operation(*args, **kwargs))
    made = [row for row in notes.rows if row.op == str(operation)]
    assert len(made) == 1
    assert all(row.has_fp32 == (everything and row.numel > 0) for row in made)
    assert all(isinstance(row.values, torch.Tensor) and row.values.device.type == "cuda" for row in notes.rows)
    traced = traced_ops(notes, Names().full)
    copies = [] if traced is None else [copy.tensor for copy in traced.copies]  # type: ignore[attr-defined]
    assert [tuple(copy.shape) for copy in copies] == ([(len(notes.rows), NUM_VALUES)] if notes.rows else [])
