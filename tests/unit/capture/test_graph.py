"""What is recorded of one backward pass: which gradients, under which names, computed from which."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradaudit.capture import graph
from gradaudit.capture.graph import GradientPlace, Marks, hook_graph
from gradaudit.capture.names import LOSS, Name, Names
from gradaudit.store import Run, TensorInfo
from tests.unit.capture.trainings import WIDTH, batch, by_name, net, record, scaler, step


def labels(run: Run, ids: tuple[int, ...]) -> list[str]:
    return [f"{run.tensors()[i].fqn} [{run.tensors()[i].op}]" for i in ids]


def find(run: Run, fqn: str, op: str, kind: str | None = None) -> TensorInfo:
    (found,) = [t for t in run.tensors() if t.fqn == fqn and t.op == op and kind in (None, t.kind)]
    return found


def ancestors(run: Run, tensor: TensorInfo) -> set[int]:
    """Every gradient that one was computed from."""
    found: set[int] = set()
    todo = list(tensor.parents)
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo += run.tensors()[i].parents
    return found


def train_once(model: nn.Module, *, autocast: bool = True) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            loss = model(batch()).float().square().mean()
        scaler().scale(loss).backward()
        optimizer.step()

    return train


def test_the_outputs_of_modules_are_named_and_chained_towards_the_loss(tmp_path: Path) -> None:
    model = net()
    run = record(tmp_path / "run", train_once(model, autocast=False), model=model)
    first, relu, last = (
        find(run, fqn, op, "output_grad") for fqn, op in (("0", "Addmm"), ("1", "Relu"), ("2", "Addmm"))
    )
    assert first.parents == (relu.id,)
    assert relu.parents == (last.id,)
    assert first.exact  # ReLU's backward copies
    assert not relu.exact
    assert last.module == "Linear"
    assert ancestors(run, first) >= {relu.id, last.id, *last.parents}
    params = by_name(run, "param_grad")
    for name, output in (("0.weight", first), ("2.weight", last)):
        (product,) = params[name].parents  # as it leaves the product, still transposed
        assert run.tensors()[product].op == "T"
        assert run.tensors()[product].parents == (output.id,)


def test_the_operations_of_the_loss_belong_to_the_loss(tmp_path: Path) -> None:
    model = net()
    run = record(tmp_path / "run", train_once(model, autocast=False), model=model)
    ops = [tensor.op for tensor in run.tensors() if tensor.fqn == "loss"]
    assert {"Mul", "Mean", "Pow"} <= set(ops)
    scaled = find(run, "loss", "Mul")
    assert scaled.parents == ()
    rows = run.samples(tensors=[scaled.id])
    assert rows.amax.tolist() == [1.0]  # where backward starts


class Residual(nn.Module):
    """x + f(x), with a product of two branches in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        out: torch.Tensor = h + self.b(h) * h
        return out


def test_the_addends_of_a_gradient_that_is_a_sum_are_its_parents_with_their_energies(tmp_path: Path) -> None:
    model = nn.Sequential(Residual(), nn.Linear(WIDTH, 2))
    run = record(tmp_path / "run", train_once(model, autocast=False), model=model)
    tanh = find(run, "0", "Tanh")
    assert labels(run, tanh.parents) == ["0 [Add -> Tanh]", "0 [Mul -> Tanh]", "0 [Addmm -> Tanh]"]
    assert not tanh.exact
    edges = [run.tensors()[i] for i in tanh.parents]
    assert [edge.exact for edge in edges] == [True, False, False]
    assert all(edge.kind == "op_grad" for edge in edges)
    assert [labels(run, edge.parents) for edge in edges] == [["0 [Add]"], ["0 [Mul]"], ["0.b [Addmm]"]]
    rows = run.samples(tensors=[tanh.id, *tanh.parents])
    assert rows.numel.tolist() == [4 * WIDTH] * 4


def test_every_recorded_gradient_is_the_one_autograd_computed(tmp_path: Path) -> None:
    model = nn.Sequential(Residual(), nn.Linear(WIDTH, 2))
    seen: dict[str, float] = {}

    def remember(name: str) -> Any:
        return lambda grad: seen.__setitem__(name, float(grad.abs().max()))

    handles = []

    def note(name: str) -> Any:
        return lambda module, args, output: output.register_hook(remember(name)) and None

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(note(name)))
    run = record(tmp_path / "run", train_once(model, autocast=False), model=model)
    for name, amax in seen.items():
        (tensor,) = [t for t in run.tensors() if t.fqn == name and t.kind == "output_grad"]
        assert run.samples(tensors=[tensor.id]).amax.tolist() == [amax]
    assert sorted(seen) == ["0", "0.a", "0.b", "1"]


def test_attention_shows_its_scores_and_products(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return (q @ k.transpose(-1, -2) / 3.0).softmax(-1) @ v

    model = nn.Sequential(Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(batch(0, 2, 5, WIDTH)).square().mean().backward()
        optimizer.step()

    run = record(tmp_path / "run", train, model=model)
    ops = {tensor.op for tensor in run.tensors() if tensor.fqn == "0" and tensor.kind == "op_grad"}
    assert {"Softmax", "Div"} <= ops
    qkv = [tensor for tensor in run.tensors() if tensor.fqn == "0.qkv" and tensor.kind == "output_grad"]
    softmax = find(run, "0", "Softmax")
    assert softmax.id in ancestors(run, qkv[0])


def test_a_weight_gradient_is_recorded_in_fp16_under_the_parameters_name(tmp_path: Path) -> None:
    model = net()
    run = record(tmp_path / "run", train_once(model), model=model)
    half = find(run, "0.weight", "ToCopy")
    assert half.dtype == "float16"
    assert half.kind == "op_grad"
    whole = by_name(run, "param_grad")["0.weight"]
    assert whole.dtype == "float32"
    assert whole.parents == (half.id,)
    rows = run.samples(tensors=[half.id, whole.id])
    assert rows.amax[0] == rows.amax[1]
    assert rows.scaled.all()
    output = find(run, "0", "Addmm", "output_grad")
    assert output.dtype == "float16"
    assert half.parents == (output.id,)


def test_a_weights_noise_gain_is_fan_in_times_mean_square_of_its_input(tmp_path: Path) -> None:
    model = net()
    run = record(tmp_path / "run", train_once(model, autocast=False), model=model)
    params = by_name(run, "param_grad")
    rows = run.samples(tensors=[params["0.weight"].id, params["0.bias"].id])
    gains = dict(zip(rows.tensor.tolist(), rows.noise_gain.tolist(), strict=True))
    assert gains[params["0.weight"].id] == pytest.approx(WIDTH * float(batch().square().mean()), rel=1e-6)
    assert np.isnan(gains[params["0.bias"].id])


def test_a_place_has_the_same_name_at_every_step(tmp_path: Path) -> None:
    model = nn.Sequential(Residual(), Residual())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = record(
        tmp_path / "run", lambda: [step(model, optimizer, scaler(), i=i) for i in range(6)], model=model, every=1
    )
    rows = run.samples()
    per_tensor = np.bincount(rows.tensor, minlength=len(run.tensors()))
    assert set(per_tensor.tolist()) == {6}
    parents = [tensor for tensor in run.tensors() if tensor.kind != "output"]
    assert all(parent < len(run.tensors()) for tensor in parents for parent in tensor.parents)


def test_a_module_called_twice_has_one_gradient_per_call(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(torch.tanh(self.layer(x)))
            return out

    model = Twice()
    run = record(tmp_path / "run", train_once(model, autocast=False), model=model)
    calls = [tensor for tensor in run.tensors() if tensor.fqn == "layer" and tensor.kind == "output_grad"]
    assert len(calls) == 2
    # its gradient is a sum over both calls, which are told apart
    weight = by_name(run, "param_grad")["layer.weight"]
    edges = [run.tensors()[i] for i in weight.parents]
    assert len(edges) == 2
    assert {call.id for call in calls} <= ancestors(run, weight)


def test_outputs_in_tuples_dicts_and_dataclasses_are_found(tmp_path: Path) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"a": self.a(x), "nested": [self.b(x), None]}

    model = Several()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        out = model(batch())
        (out["a"].mean() + out["nested"][0].mean()).backward()
        optimizer.step()

    run = record(tmp_path / "run", train, model=model)
    whole = [tensor for tensor in run.tensors() if tensor.kind == "output" and tensor.fqn == "Several"]
    assert [tensor.shape for tensor in whole] == [(4, 2), (4, 3)]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_code_is_not_blind(tmp_path: Path, *, use_reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(WIDTH, WIDTH), nn.Sequential(Residual(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.block, self.first(x), use_reentrant=use_reentrant)
            return out

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(tmp_path / "run", lambda: [step(model, optimizer, i=i) for i in range(3)], model=model, every=1)
    inside = {
        (t.fqn, t.op) for t in run.tensors() if t.kind in ("output_grad", "op_grad") and t.fqn.startswith("block.0")
    }
    assert {("block.0", "Tanh"), ("block.0", "Mul"), ("block.0.b", "Addmm"), ("block.0.a", "Addmm")} <= inside
    halves = {t.fqn for t in run.tensors() if t.op == "ToCopy" and t.dtype == "float16" and t.fqn.endswith("weight")}
    assert halves >= {"block.0.a.weight", "block.1.weight", "first.weight"}
    rows = run.samples(tensors=[find(run, "block.0", "Tanh").id])
    assert rows.numel.tolist() == [4 * WIDTH] * 3  # once a step, recomputed or not


def test_micro_steps_of_one_place_are_merged(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i in range(3):
            s.scale(model(batch(i)).square().mean()).backward()
        s.step(optimizer)
        s.update()

    run = record(tmp_path / "run", train, model=model)
    rows = run.samples(tensors=[find(run, "0", "Addmm", "output_grad").id])
    assert rows.numel.tolist() == [3 * 4 * WIDTH]
    params = run.samples(tensors=[by_name(run, "param_grad")["0.weight"].id])
    assert params.numel.tolist() == [WIDTH * WIDTH]


def test_custom_functions_may_keep_anything_on_their_context(tmp_path: Path) -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.variable, ctx.next_functions_of_mine = "text", 3
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    class AccumulateGrad(Odd):
        """Called like torch's own node."""

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        AccumulateGrad.apply(Odd.apply(model(batch()))).mean().backward()
        optimizer.step()

    run = record(tmp_path / "run", train, model=model)
    assert {"Odd", "AccumulateGrad"} <= {tensor.op for tensor in run.tensors()}


def test_a_deep_graph_is_walked_without_recursion() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(5000):
        y = y * 1.0
    places: list[GradientPlace] = []
    walk = hook_graph([y.sum()], Marks(), Names(), lambda place, grad: places.append(place))
    y.sum().backward()
    walk.remove()
    assert len(places) >= 5000
    assert len({place.key for place in places}) == len(places)


def test_hooks_keep_no_gradient_and_leave_with_the_walk() -> None:
    x = torch.ones(3, requires_grad=True)
    alive: list[Any] = []
    loss = (x.tanh() * 2).sum()
    walk = hook_graph([loss], Marks(), Names(), lambda place, grad: alive.append(weakref.ref(grad)))
    loss.backward(retain_graph=True)
    num_seen = len(alive)
    assert num_seen > 0
    gc.collect()
    assert all(ref() is None for ref in alive)

    walk.remove()
    loss.backward()
    assert len(alive) == num_seen


def test_marks_forget_the_older_half_and_still_know_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_MARKS", 10)
    marks = Marks()
    for i in range(12):
        marks.mark(i * 10, Name(0, str(i)), "Linear")
        marks.outputs[(i * 10, 0)] = (Name(0, str(i)), "Linear")
    marks.trim()
    assert len(marks.starts) == 6
    assert marks.owner(119) == (Name(0, "11"), "Linear")
    assert marks.owner(5) == (LOSS, "")
    assert min(marks.outputs) == (60, 0)


def test_the_gradient_of_a_broadcast_addend_is_not_an_exact_copy(tmp_path: Path) -> None:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.bias = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.first(x) + self.bias(x[:1])
            return F.relu(out)

    model = Bias()
    run = record(tmp_path / "run", train_once(model, autocast=False), model=model)
    assert find(run, "first", "Addmm", "output_grad").exact
    assert not find(run, "bias", "Addmm", "output_grad").exact
