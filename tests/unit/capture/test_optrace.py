"""The traced forward: which operation made what, from what, in whose code, on which line, and how large in FP32."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradaudit
from gradaudit.capture.trace import opnotes
from gradaudit.store.tables import OpRow

FP16_MAX = 65504.0


class Block(nn.Module):
    """`code` is the forward of a parent that computes with two children's outputs itself."""

    def __init__(self, code: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))
        for layer in (self.a, self.b):
            nn.init.constant_(layer.weight, 0.0)
            nn.init.constant_(layer.bias, 300.0)
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self, x)


def half() -> Any:
    return torch.autocast("cpu", dtype=torch.float16)


def traced(
    tmp_path: Path, code: Callable[[Block, torch.Tensor], torch.Tensor], *, num_steps: int = 1, **options: Any
) -> gradaudit.Run:
    model = Block(code)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with gradaudit.attach(model, optimizer, out=tmp_path / "run", **{"origin": "always", **options}):
        for _ in range(num_steps):
            train_step(model, optimizer)
    run = gradaudit.open_run(tmp_path / "run")
    assert run.meta["errors"] == []
    return run


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.ones(3, 4)
    optimizer.zero_grad()
    with half():
        loss = model(x).float().mean()
    loss.backward()
    optimizer.step()


def line_of(code: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(code)
    return next(first + i for i, line in enumerate(lines) if text in line)


def births(ops: tuple[OpRow, ...]) -> list[OpRow]:
    """Rows that are not finite though all their inputs are."""
    rows = {(op.step, op.order): op for op in ops}
    return [op for op in ops if not op.is_finite and all(rows[op.step, i].is_finite for i in op.inputs)]


def the(ops: tuple[OpRow, ...], name: str, **more: Any) -> OpRow:
    (found,) = [op for op in ops if op.name == name and all(getattr(op, key) == value for key, value in more.items())]
    return found


def product(block: Block, x: torch.Tensor) -> torch.Tensor:
    gate, up = block.a(x), block.b(x)
    both = gate * up  # the product
    return block.out(both)


def test_a_product_in_a_parents_code_is_its_own_and_not_the_next_childs(tmp_path: Path) -> None:
    run = traced(tmp_path, product)
    (birth,) = births(run.ops())
    assert (birth.op, birth.module, birth.module_class) == ("aten.mul.Tensor", "Block", "Block")
    assert birth.file is not None
    assert birth.file.endswith("test_optrace.py")
    assert birth.line == line_of(product, "the product")
    assert (birth.dtype, birth.shape, birth.numel) == ("float16", (3, 4), 12)
    assert (birth.num_posinf, birth.num_neginf, birth.num_nan, birth.amax) == (12, 0, 0, 0.0)
    assert birth.amax_fp32 == 300.0**2
    assert birth.autocast
    made_by = [run.ops()[i] for i in birth.inputs]
    assert [(row.name, row.module, row.amax) for row in made_by] == [("addmm", "a", 300.0), ("addmm", "b", 300.0)]


def test_a_layers_operation_names_its_parameters_and_the_batch(tmp_path: Path) -> None:
    ops = traced(tmp_path, product).ops()
    layer = the(ops, "addmm", module="a")
    casts = [ops[i] for i in layer.inputs]
    assert {cast.name for cast in casts} == {"to_copy"}
    sources = {(ops[i].module, ops[i].module_class) for cast in casts for i in cast.inputs}
    assert sources == {("a.weight", "param"), ("a.bias", "param"), ("batch", "batch")}
    assert the(ops, "input", module="a.bias").amax == 300.0


def cast_of_a_constant(block: Block, x: torch.Tensor) -> torch.Tensor:
    wide = block.a(x).float() * 220.82
    return block.out(wide)  # casts its input


def test_a_cast_to_half_that_overflows_says_how_large_the_value_was(tmp_path: Path) -> None:
    (birth,) = births(traced(tmp_path, cast_of_a_constant).ops())
    assert (birth.name, birth.module, birth.dtype) == ("to_copy", "out", "float16")
    assert birth.amax_fp32 == pytest.approx(66_246, rel=1e-6)
    assert birth.line == line_of(cast_of_a_constant, "casts its input")


def in_place(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.a(x).clone()
    y.mul_(250.0)
    y[:, 0].add_(10.0)
    return block.out(y * 0.001)


def test_an_operation_in_place_is_computed_again_on_what_it_overwrote(tmp_path: Path) -> None:
    ops = traced(tmp_path, in_place).ops()
    (birth,) = births(ops)
    assert (birth.op, birth.amax_fp32, birth.constants) == ("aten.mul_.Tensor", 75_000.0, (250.0,))
    assert [ops[i].name for i in birth.inputs] == ["clone"]
    # a column was written over the whole: what reads the whole depends on both
    after = the(ops, "mul", constants=(0.001,))
    assert {ops[i].op for i in after.inputs} == {"aten.mul_.Tensor", "aten.add_.Tensor"}


def a_finite_part(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.a(x) + block.mask.half()  # the last column is -inf
    return block.out(nn.functional.pad(y[:, :3].reshape(-1, 3), (0, 1)).view(3, 4))


def test_a_view_of_less_has_values_of_its_own_and_a_view_of_all_has_none(tmp_path: Path) -> None:
    ops = traced(tmp_path, a_finite_part).ops()
    cut = the(ops, "slice")
    assert cut.is_finite
    assert [ops[i].num_neginf for i in cut.inputs] == [3]
    assert not any(op.name in ("view", "t", "detach", "alias", "expand") for op in ops)
    assert the(ops, "input", module="mask").module_class == "buffer"
    assert all(ops[i].is_finite for i in the(ops, "addmm", module="out").inputs)


def softmax_of_a_masked_row(block: Block, x: torch.Tensor) -> torch.Tensor:
    scores = block.a(x).masked_fill(torch.tensor([[True], [False], [True]]), -torch.inf)
    return block.out(scores.softmax(-1))


def test_rows_of_a_softmax_that_leave_nothing_are_counted(tmp_path: Path) -> None:
    ops = traced(tmp_path, softmax_of_a_masked_row).ops()
    softmax = the(ops, "softmax")
    assert softmax.num_masked_rows == 2
    assert softmax.num_nan == 8
    assert the(ops, "masked_fill").constants == (-torch.inf,)
    assert the(ops, "addmm", module="out").num_masked_rows is None


def attention_with_a_mask(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.a(x)[None, None]
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, False]])
    return block.out(nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)[0, 0])


def test_rows_masked_in_fused_attention_are_counted(tmp_path: Path) -> None:
    ops = traced(tmp_path, attention_with_a_mask).ops()
    assert 1 in [op.num_masked_rows for op in ops]


def loss_in_half(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.a(x)
    with torch.autocast("cpu", enabled=False):
        return (y + 1e-9) / 3.0  # by hand


def test_constants_and_the_autocast_of_their_region_are_noted(tmp_path: Path) -> None:
    ops = traced(tmp_path, loss_in_half).ops()
    added, divided = the(ops, "add", module="Block"), the(ops, "div", module="Block")
    assert (added.constants, divided.constants) == ((1e-9,), (3.0,))
    assert not added.autocast
    assert the(ops, "addmm", module="a").autocast
    mean = the(ops, "mean")
    assert (mean.module, mean.constants) == ("loss", ())


def test_the_scale_of_a_scaler_is_a_constant_of_the_scaled_loss(tmp_path: Path) -> None:
    model = Block(product)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with gradaudit.attach(model, optimizer, scaler, out=tmp_path / "run", origin="always"):
        for _ in range(2):
            with half():
                loss = model(torch.ones(3, 4)).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    ops = tuple(op for op in gradaudit.open_run(tmp_path / "run").ops() if op.step == 1)
    assert ops[-1].constants == (512.0,)
    assert ops[-1].sequence is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_is_traced_once(tmp_path: Path, *, reentrant: bool) -> None:
    def checkpointed(block: Block, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        return checkpoint(lambda y: product(block, y), x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    run = traced(tmp_path, checkpointed)
    (birth,) = births(run.ops())
    assert birth.line == line_of(product, "the product")
    assert len([op for op in run.ops() if op.name == "addmm"]) == 3


def test_gradients_get_the_line_of_the_operation_that_made_the_tensor(tmp_path: Path) -> None:
    for origin in ("always", "auto"):  # the look at the first forward is enough
        run = traced(tmp_path, product, origin=origin, force=True)
        lines = {
            tensor.op: tensor.line for tensor in run.tensors() if tensor.kind == "op_grad" and "Block" in tensor.fqn
        }
        assert lines["Mul"] == line_of(product, "the product")


def test_the_look_notes_half_operations_of_the_first_forward_only(tmp_path: Path) -> None:
    run = traced(tmp_path, loss_in_half, num_steps=3, origin="auto", every=100)
    assert {op.step for op in run.ops()} == {0}
    assert run.steps.traced.tolist() == [0, 0, 0]
    assert not any(op.op == "input" for op in run.ops())
    assert "mean" not in [op.name for op in run.ops()]
    added = the(run.ops(), "add")
    assert (added.constants, added.amax_fp32, added.autocast) == ((1e-9,), None, False)


def by_way_of_fp32(block: Block, x: torch.Tensor) -> torch.Tensor:
    wide = product_of(block, x).float()
    return block.out(wide - wide.mean())


def product_of(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.a(x) * block.b(x)


def test_what_the_look_leaves_out_still_hands_on_where_values_came_from(tmp_path: Path) -> None:
    run = traced(tmp_path, by_way_of_fp32, origin="auto", every=100)
    (birth,) = births(run.ops())
    assert (birth.name, birth.module) == ("mul", "Block")
    assert "sub" not in [op.name for op in run.ops()]


def test_an_overflow_in_the_look_is_computed_again_and_starts_a_trace(tmp_path: Path) -> None:
    run = traced(tmp_path, product, num_steps=3, origin="auto", every=100)
    (seen, caught) = births(run.ops())[:2]
    assert (seen.step, seen.amax_fp32) == (0, 90_000.0)
    assert (caught.step, caught.amax_fp32) == (1, 90_000.0)
    assert run.steps.traced.tolist()[:2] == [0, 1]


def test_a_training_without_modules_is_traced_from_its_second_step_on(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.full((4,), 300.0))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    with gradaudit.attach(nn.Identity(), optimizer, out=tmp_path / "run", origin="always"):
        for _ in range(2):
            (weight.half() * weight.half()).float().mean().backward()
            optimizer.step()
            weight.grad = None
    run = gradaudit.open_run(tmp_path / "run")
    assert [(op.step, op.name, op.amax_fp32) for op in births(run.ops())] == [(1, "mul", pytest.approx(9e4, rel=1e-3))]


def test_evaluation_without_gradients_is_not_noted(tmp_path: Path) -> None:
    model = Block(product)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with gradaudit.attach(model, optimizer, out=tmp_path / "run", origin="always"):
        for _ in range(2):
            train_step(model, optimizer)
            for no_grad in (torch.no_grad, torch.inference_mode):
                with no_grad(), half():
                    model(torch.ones(3, 4))
    run = gradaudit.open_run(tmp_path / "run")
    assert [len([op for op in run.ops() if op.name == "addmm" and op.step == i]) for i in (0, 1)] == [3, 3]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def counted(tmp_path: Path | None, *, around: str) -> tuple[list[str], tuple[OpRow, ...], int]:
    """A training under a mode of the user's: around the loop, or around loss and backward."""
    torch.manual_seed(0)
    model, mode = Block(product), Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            with half():
                out = model(torch.ones(3, 4))
            if around == "loop":
                out.float().mean().backward()
            else:
                with mode:
                    out.float().mean().backward()
            optimizer.step()

    def whole() -> None:
        if around == "loop":
            with mode:
                train()
        else:
            train()

    if tmp_path is None:
        whole()
        return mode.calls, (), 0
    with gradaudit.attach(model, optimizer, out=tmp_path / "run", origin="always", every=100):
        whole()
    run = gradaudit.open_run(tmp_path / "run")
    assert run.meta["errors"] == []
    return mode.calls, run.ops(), int(run.steps.traced.sum())


def test_a_mode_of_the_users_around_the_loop_is_left_alone(tmp_path: Path) -> None:
    _, ops, num_traced = counted(tmp_path, around="loop")
    assert ops == ()
    assert num_traced == 0


def test_a_mode_of_the_users_around_loss_and_backward_comes_on_top_and_misses_nothing(tmp_path: Path) -> None:
    plain, _, _ = counted(None, around="loss")
    seen, ops, num_traced = counted(tmp_path, around="loss")
    assert num_traced == 2
    assert [op.step for op in births(ops) if op.name == "mul"] == [0, 1]
    assert set(plain) <= set(seen)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_what_a_forward_did_before_it_raised_is_kept_without_a_step(tmp_path: Path) -> None:
    def fails(block: Block, x: torch.Tensor) -> torch.Tensor:
        y = product(block, x)
        raise ValueError("the user's own")
        return y

    with pytest.raises(ValueError, match="the user's own"):
        traced(tmp_path, fails)
    run = gradaudit.open_run(tmp_path / "run")
    assert len(run.steps) == 0
    assert [(op.step, op.name) for op in births(run.ops())] == [(0, "mul")]
    assert set(run.samples().step.tolist()) == {0}


def test_a_training_that_ends_well_leaves_nothing_behind_its_last_step(tmp_path: Path) -> None:
    model = Block(product)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with gradaudit.attach(model, optimizer, out=tmp_path / "run", origin="always"):
        train_step(model, optimizer)
        model(torch.ones(3, 4))
    assert {op.step for op in gradaudit.open_run(tmp_path / "run").ops()} == {0}


def test_a_failure_of_the_trace_ends_the_trace_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("a bug of gradaudit's")

    monkeypatch.setattr(opnotes, "read_output", fail)
    model = Block(product)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with gradaudit.attach(model, optimizer, out=tmp_path / "run", origin="always"):
        for _ in range(2):
            train_step(model, optimizer)
    run = gradaudit.open_run(tmp_path / "run")
    assert run.meta["errors"] == ["the operation trace stopped: ZeroDivisionError: a bug of gradaudit's"]
    assert len(run.steps) == 2
    assert run.ops() == ()


def test_a_step_of_many_operations_is_not_kept_whole_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opnotes, "MAX_OPS", 5)
    run = traced(tmp_path, product)
    assert 5 <= len(run.ops()) <= 8  # an operation and its inputs stay together
    assert run.steps.traced.tolist() == [0]


def test_no_tensor_is_kept_alive_by_the_trace(tmp_path: Path) -> None:
    kept: list[Any] = []

    def noted(block: Block, x: torch.Tensor) -> torch.Tensor:
        big = block.a(x).repeat(1000, 1)
        kept.append(torch.multiprocessing.reductions.StorageWeakRef(big.untyped_storage()))
        with torch.no_grad():
            total = big.sum()
        del big
        assert kept[-1].expired()
        return block.out(x) + total * 0

    assert the(traced(tmp_path, noted).ops(), "repeat").numel == 12_000
