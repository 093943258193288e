"""What run and step table say of weights, buffers and updates, and of how the training was set up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradaudit
from gradaudit.capture import weights
from gradaudit.capture.setup import state_facts
from gradaudit.capture.statistic import row_values, update_row
from gradaudit.store import Run, open_run
from tests.unit.capture.trainings import WIDTH, batch, net, record, scaler, step


def named(run: Run, column: list[Any]) -> list[list[str] | None]:
    """Kind and name of the tensors that a column of ids refers to."""
    tensors = run.tensors()
    return [None if ids is None else [f"{tensors[i].kind} {tensors[i].fqn}" for i in ids] for ids in column]


def updates(run: Run) -> dict[int, dict[str, tuple[int, int, float]]]:
    """Per step and parameter: elements with a gradient, those unchanged, and the largest change."""
    rows: dict[int, dict[str, tuple[int, int, float]]] = {}
    samples, tensors = run.samples(), run.tensors()
    for i in range(len(samples)):
        tensor = tensors[samples.tensor[i]]
        if tensor.kind == "update":
            numbers = (int(samples.numel[i]), int(samples.num_zero[i]), float(samples.amax[i]))
            rows.setdefault(int(samples.step[i]), {})[tensor.fqn] = numbers
    return rows


def test_weights_that_are_not_finite_are_named_on_sampled_steps(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        for i in range(6):
            if i == 4:
                model[2].weight.data[0, 0] = torch.nan
            step(model, optimizer, i=i)

    run = record(tmp_path / "run", train, model=model, every=2)
    looked = named(run, run.steps.weights_nonfinite)
    assert looked[0] == looked[2] == []
    assert looked[1] is None
    assert looked[4] == ["param 2.weight"]
    (entry,) = [tensor for tensor in run.tensors() if tensor.kind == "param" and tensor.fqn == "2.weight"]
    assert (entry.shape, entry.dtype) == ((2, WIDTH), "float32")
    gradients = [tensor for tensor in run.tensors() if tensor.kind == "param_grad" and tensor.fqn == "2.weight"]
    assert len(gradients) == 1
    assert gradients[0].id != entry.id


class Masked(nn.Module):
    """Running statistics, a causal mask full of -inf, a table of integers and one too large to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, 2)
        self.register_buffer("mask", torch.full((WIDTH, WIDTH), -torch.inf).triu(1))
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("large", torch.zeros(101))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


@pytest.mark.parametrize("given", [True, False])
def test_buffers_that_become_non_finite_are_named_and_masks_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, given: bool
) -> None:
    monkeypatch.setattr(weights, "MAX_BUFFER_NUMEL", 100)
    model, s = Masked(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        for i in range(3):
            x = batch(i)
            if i == 1:
                x[0, 3] = torch.inf
                model.large[0] = torch.inf
            optimizer.zero_grad()
            s.scale(model(x).square().mean()).backward()
            s.step(optimizer)
            s.update()

    run = record(tmp_path / "run", train, model=model if given else None, every=1)
    bad = ["buffer norm.running_mean", "buffer norm.running_var"]
    assert named(run, run.steps.buffers_nonfinite) == [[], bad, bad]
    assert named(run, run.steps.weights_nonfinite) == [[], [], []]  # protected: the step was skipped
    assert run.steps.skipped.tolist() == [False, True, False]


def test_a_model_that_comes_later_has_its_buffers_looked_at_from_then_on(tmp_path: Path) -> None:
    first, second = Masked(), Masked()
    second.norm.running_mean[0] = torch.nan  # before anybody looked
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.0)

    def train() -> None:
        for i in range(3):
            optimizer.zero_grad()
            (first(batch(i)).mean() + (second(batch(i)).mean() if i else 0.0)).backward()
            if i == 1:
                second.norm.running_var[0] = torch.inf
            optimizer.step()

    run = record(tmp_path / "run", train, model=first, every=1)
    names = named(run, run.steps.buffers_nonfinite)
    assert names[0] == []
    assert names[1] == names[2] == ["buffer second.norm.running_var"]


@pytest.mark.parametrize("shape", [(4,), ()])
def test_a_scaled_loss_in_half_is_looked_at_and_another_need_not_be(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model, s = net(), scaler(init_scale=2.0**15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        for magnitude in (1.0, 100.0):
            optimizer.zero_grad()
            loss = (model(batch()).sum(1) * 0.0 + magnitude).half().expand(4)
            loss = s.scale(loss if shape else loss.float().mean())
            loss.sum().backward()
            s.step(optimizer)
            s.update()

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.scaled_loss_finite.tolist() == ([1, 0] if shape else [-1, -1])
    assert steps.loss.tolist() == [1.0, 100.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_updates_that_round_to_nothing_are_counted_for_weights_that_are_not_fp32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = net().to(dtype)
    model[0].bias.requires_grad_(False)
    model[0].bias[0] = -100  # its unit is dead, and so are the gradients of its row
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=3e-3)
    before = model[0].weight.detach().clone()
    gradients, first = [], []

    def train() -> None:
        for i in range(2):
            optimizer.zero_grad()
            model(batch(i).to(dtype)).square().mean().backward()
            gradients.append(model[0].weight.grad.clone())
            optimizer.step()
            first.append(model[0].weight.detach().clone())

    run = record(tmp_path / "run", train, model=model, every=100)
    found = updates(run)
    assert set(found) == {0}
    assert set(found[0]) == {"0.weight"}  # the others are frozen or have a learning rate of zero
    counted = gradients[0] != 0
    unchanged = counted & (first[0] == before)
    numel, num_zero, amax = found[0]["0.weight"]
    assert (numel, num_zero) == (int(counted.sum()), int(unchanged.sum()))
    assert 0 < num_zero < numel < before.numel()
    assert amax == float((first[0].float() - before.float()).abs().max())


def test_skipped_updates_and_fp32_weights_leave_no_row(tmp_path: Path) -> None:
    half, full, s = net().bfloat16(), net(), scaler()

    def train() -> None:
        for model in (half, full):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i in range(2):
                step(model, optimizer, s, i=i, poison=(0,) if i == 0 else ())

    run = record(tmp_path / "run", train, every=1)
    assert run.steps.skipped.tolist() == [True, False] * 2
    assert set(updates(run)) == {1}


def test_the_statistic_of_a_change_counts_only_what_it_is_told_to() -> None:
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, torch.nan])
    after = torch.tensor([1.0, 1.5, 9.0, 1.0, 1.0])
    row = update_row(before, after, torch.tensor([True, True, False, False, True]))
    values = row_values(row.numpy())
    assert [values[key] for key in ("numel", "num_zero", "num_nan", "amax")] == [3, 1, 1, 0.5]


def test_dtypes_state_and_eps_of_an_optimizer_are_written_down(tmp_path: Path) -> None:
    model = net()
    model[2].half()
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], eps=1e-6)

    def train() -> None:
        for i in range(2):
            optimizer.zero_grad()
            model[2](model[1](model[0](batch(i))).half()).float().square().mean().backward()
            optimizer.step()

    (entry,) = record(tmp_path / "run", train, model=model, every=1).meta["optimizers"]
    assert entry["param_dtypes"] == ["float32", "float32", "float16", "float16"]
    assert entry["param_devices"] == ["cpu"]
    assert entry["eps"] == 1e-6
    assert entry["fused"] is False
    assert entry["state_dtypes"] == {"exp_avg": "float16", "exp_avg_sq": "float16"}
    assert entry["keeps_masters"] is False


class WithMasters(torch.optim.SGD):
    """Steps on FP32 copies of half weights."""

    def __init__(self, params: Any, key: str, value: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.key, self.value = key, value

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state[self.key] = self.value(param)
                state[self.key].sub_(param.grad.float(), alpha=group["lr"] if "buf" not in self.key else 0.0)
                param.copy_(param if "buf" in self.key else state[self.key])


@pytest.mark.parametrize(
    ("key", "value", "keeps"),
    [
        ("master_param", lambda param: param.detach().float(), True),
        ("fp32", lambda param: param.detach().float() + 1e-9, True),
        ("momentum_buf", lambda param: torch.ones_like(param, dtype=torch.float32) * 3, False),
    ],
)
def test_fp32_copies_of_half_weights_are_recognised(tmp_path: Path, key: str, value: Any, keeps: bool) -> None:
    model = net().half()
    optimizer = WithMasters(model.parameters(), key, value)

    def train() -> None:
        for i in range(3):
            optimizer.zero_grad()
            model(batch(i).half()).float().square().mean().backward()
            optimizer.step()

    (entry,) = record(tmp_path / "run", train, model=model, every=1).meta["optimizers"]
    assert entry["keeps_masters"] is keeps
    assert entry["state_dtypes"] == {key: "float32"}


def test_state_that_is_zero_throughout_is_no_copy_of_weights_that_are() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([param], lr=0.1)
    assert state_facts(optimizer) is None
    optimizer.state[param] = {"momentum_buffer": torch.zeros(3), "step": torch.tensor(1.0)}
    facts = state_facts(optimizer)
    assert facts is not None
    assert facts.dtypes == {"momentum_buffer": "float32"}
    assert [bool(equal) for equal in facts.equal] == [False]


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_what_hooks_cannot_look_into_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Sequential(nn.Linear(WIDTH, 2), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(tmp_path / "run", lambda: step(model, optimizer), model=model)
    assert run.meta["hidden_modules"] == [{"name": "1", "kind": "scripted"}]
    assert run.meta["distributed"] is None


def test_compiled_functions_are_named_by_the_module_they_are_in(tmp_path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2)
            self.act = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.layer(x))

    model = nn.Sequential(Half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(tmp_path / "run", lambda: step(model, optimizer), model=model)
    assert run.meta["hidden_modules"] == [{"name": "0", "kind": "compiled"}]


def test_the_backend_of_distributed_training_is_written_down(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    with gradaudit.attach(model, out=tmp_path / "run"):
        try:
            step(model, optimizer)
        finally:
            torch.distributed.destroy_process_group()
    assert open_run(tmp_path / "run").meta["distributed"] == {"backend": "gloo"}
