"""Nothing on the training thread waits for a device: fake CUDA tensors refuse every operation that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from gradaudit.capture import reading
from gradaudit.capture.auditor import Auditor
from gradaudit.capture.patches import install
from gradaudit.capture.reading import largest_each, mean, mean_square, stack_rows, stack_scalars
from gradaudit.capture.recorder import Packet, SampledTensors
from gradaudit.capture.settings import CaptureSettings
from gradaudit.capture.statistic import ROW_WIDTH, tensor_row

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

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


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

READINGS: list[Callable[[torch.Tensor], Any]] = [tensor_row, lambda x: largest_each([x, x]), mean, mean_square]


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
        self.events: list[dict[str, Any]] = []

    def put(self, packet: Packet) -> None:
        self.packets.append(packet)

    def put_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class FusedOptimizer(torch.optim.SGD):
    """Takes the scale and found_inf from the scaler as fused optimizers do, so that torch itself need not wait."""

    _step_supports_amp_scaling = True
    _need_device_dtype_check_for_fused = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.9)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_whole_training_step_is_observed_without_waiting(
    monkeypatch: pytest.MonkeyPatch, *, clip: bool, sparse: bool
) -> None:
    monkeypatch.setattr(reading, "HostCopy", PretendedCopy)
    auditor, packets = Auditor(CaptureSettings(every=1), {}), Packets()
    auditor.start(packets)  # type: ignore[arg-type]
    uninstall = install(auditor)
    try:
        train_without_data(clip=clip, sparse=sparse)
        auditor.close_open_steps()
    finally:
        uninstall()

    run = auditor.describe()
    assert run["errors"] == []
    assert len(packets.packets) == 3
    assert all(isinstance(packet.samples, SampledTensors) for packet in packets.packets)
    copies = [copy.tensor for packet in packets.packets for copy in packet.scalars]  # type: ignore[attr-defined]
    assert "meta" in {tensor.device.type for tensor in copies}
    assert {row["kind"] for row in run["tensors"]} == {"output", "output_grad", "op_grad", "param_grad"}


def train_without_data(*, clip: bool, sparse: bool) -> None:
    """Three steps under a scaler on meta tensors: torch's own loop has no operation that waits either."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Embedding(10, 8, sparse=sparse), torch.nn.Conv1d(4, 4, 3), torch.nn.ReLU(), torch.nn.Linear(6, 2)
        )
    optimizer = FusedOptimizer(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")  # a "cuda" one disables itself on a machine without
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.zeros((5, 4), dtype=torch.int64, device="meta")
        loss = model(tokens).half().square().mean()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if not p.grad.is_sparse], 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.usefixtures("fake_cuda")
def test_values_of_one_device_travel_in_one_copy_and_keep_their_order() -> None:
    cuda, cpu = torch.ones((), device="cuda"), torch.ones((), device="cpu")
    assert [copy.tensor.shape[0] for copy in stack_scalars([cuda, cuda, cpu, cuda])] == [2, 1, 1]  # type: ignore[attr-defined]
    rows = [torch.zeros(ROW_WIDTH, dtype=torch.int64, device="cuda")] * 3
    assert [tuple(copy.tensor.shape) for copy in stack_rows(rows)] == [(3, ROW_WIDTH)]  # type: ignore[attr-defined]


def test_a_copy_to_the_host_is_made_there_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradaudit.capture.recorder import HostCopy

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
