"""The step table: one row per attempted update, and what it says of the scaler."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.capture.trainings import WIDTH, batch, by_name, names, net, record, scaler, step

NUM_STEPS = 25


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_scale_and_outcome_are_those_of_the_real_scaler_at_every_step(
    tmp_path: Path, *, fused: bool, clipped: bool
) -> None:
    model, s = net(), scaler(growth_interval=3)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    rng = np.random.default_rng(0)
    poisons = [
        tuple(rng.choice(4, rng.integers(1, 4), replace=False)) if rng.random() < 0.3 else () for _ in range(NUM_STEPS)
    ]
    scales, trackers = [], []

    def train() -> None:
        for poison in poisons:
            scales.append(s.get_scale())
            trackers.append(s._get_growth_tracker())
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(batch()).float().square().mean()
            s.scale(loss).backward()
            for index in poison:
                list(model.parameters())[index].grad.view(-1)[-1] = torch.nan  # type: ignore[union-attr]
            if clipped:
                s.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            s.step(optimizer)
            s.update()

    run = record(tmp_path / "run", train, model=model)
    steps = run.steps
    assert steps.step.tolist() == list(range(NUM_STEPS))
    assert steps.scale.tolist() == scales
    assert steps.growth_tracker.tolist() == trackers
    assert steps.skipped.tolist() == [bool(poison) for poison in poisons]
    assert steps.found_inf.tolist() == [int(bool(poison)) for poison in poisons]
    assert steps.update.tolist() == list(range(NUM_STEPS))
    assert steps.scaled.all()
    assert len(set(scales)) > 3
    params = ["0.weight", "0.bias", "2.weight", "2.bias"]
    for poison, nonfinite in zip(poisons, steps.nonfinite, strict=True):
        assert sorted(names(run, nonfinite)) == sorted(params[index] for index in poison)


def test_a_step_closes_before_the_update_changes_its_scale(tmp_path: Path) -> None:
    model, s = net(), scaler(growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = record(tmp_path / "run", lambda: [step(model, optimizer, s) for _ in range(4)], model=model)
    assert run.steps.scale.tolist() == [2.0**8, 2.0**9, 2.0**10, 2.0**11]
    amax = np.stack(run.steps.param_amax)
    assert np.allclose(amax / run.steps.scale[:, None], amax[0] / 2.0**8, rtol=1e-2)  # gradients still carry the scale


def test_unscaling_and_clipping_do_not_change_what_is_read_of_the_gradients(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        step(model, optimizer, s)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch()).float().square().mean()
        s.scale(loss).backward()
        s.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        s.step(optimizer)
        s.update()

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.param_amax[0].tolist() == steps.param_amax[1].tolist()
    assert steps.scaled.tolist() == [True, True]


def test_unscaled_and_then_left_alone_is_a_step_the_script_gave_up(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for give_up in (False, True, False):
            optimizer.zero_grad()
            s.scale(model(batch()).square().mean()).backward()
            s.unscale_(optimizer)
            if not give_up:
                s.step(optimizer)
            s.update()

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.skipped.tolist() == [False, True, False]
    assert steps.found_inf.tolist() == [0, 0, 0]
    assert steps.update.tolist() == [0, 1, 2]


def test_a_scaler_step_that_raises_applied_nothing(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        s.scale(model(batch()).square().mean()).backward()
        with pytest.raises(RuntimeError, match="Closure"):
            s.step(optimizer, closure=lambda: None)
        step(model, optimizer, s)

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.skipped.tolist() == [True, False]


def test_an_optimizer_step_that_raises_is_one_the_script_gave_up(tmp_path: Path) -> None:
    class Fragile(torch.optim.SGD):
        broken = True

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.broken:
                raise ArithmeticError

    model = net()
    optimizer = Fragile(model.parameters(), lr=0.1)

    def train() -> None:
        with pytest.raises(ArithmeticError):
            step(model, optimizer, poison=(0,))
        optimizer.broken = False
        step(model, optimizer)
        optimizer.broken = True
        with pytest.raises(ArithmeticError):
            step(model, optimizer)

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.skipped.tolist() == [True, False, True]
    assert [len(ids) for ids in steps.nonfinite] == [1, 0, 0]


def test_accumulation_counts_its_micro_steps_and_means_their_losses(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[list[float]] = []

    def train() -> None:
        for num_micro in (1, 4, 3):
            optimizer.zero_grad()
            losses.append([])
            for i in range(num_micro):
                loss = model(batch(i)).square().mean()
                losses[-1].append(loss.item())
                s.scale(loss / num_micro).backward()
            s.step(optimizer)
            s.update()

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.num_micro_steps.tolist() == [1, 4, 3]
    assert steps.loss == pytest.approx([np.mean(micro) / len(micro) for micro in losses])


@pytest.mark.parametrize("enabled", [None, False])
def test_without_an_enabled_scaler_steps_are_unscaled(tmp_path: Path, *, enabled: bool | None) -> None:
    model = net()
    s = None if enabled is None else scaler(enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    run = record(
        tmp_path / "run", lambda: losses.extend(step(model, optimizer, s).item() for _ in range(3)), model=model
    )
    assert run.steps.scaler.tolist() == [-1, -1, -1]
    assert run.steps.scale.tolist() == [1.0, 1.0, 1.0]
    assert run.steps.found_inf.tolist() == [-1, -1, -1]
    assert not run.steps.skipped.any()
    assert not run.steps.scaled.any()
    assert run.steps.loss == pytest.approx(losses, rel=1e-3)


def test_a_closure_makes_one_step_however_often_it_runs(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    num_calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        num_calls.append(1)
        return loss

    run = record(tmp_path / "run", lambda: optimizer.step(closure), model=model)  # type: ignore[arg-type]
    assert run.steps.num_micro_steps.tolist() == [len(num_calls)]
    assert len(num_calls) > 1
    assert (run.steps.param_amax[0] > 0).all()


def test_two_optimizers_of_one_loss_share_what_backward_showed(tmp_path: Path) -> None:
    model, s = net(), scaler()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    losses: list[float] = []

    def train() -> None:
        for i in range(3):
            first.zero_grad()
            second.zero_grad()
            loss = model(batch(i)).square().mean()
            losses.append(loss.item())
            s.scale(loss).backward()
            if i == 1:
                model[2].bias.grad[0] = torch.inf
            s.step(first)
            s.step(second)
            s.update()

    run = record(tmp_path / "run", train, model=model)
    steps = run.steps
    assert steps.optimizer.tolist() == [0, 1] * 3
    assert steps.update.tolist() == [0, 0, 1, 1, 2, 2]
    assert steps.skipped.tolist() == [False, False, False, True, False, False]
    assert steps.num_micro_steps.tolist() == [1] * 6
    assert steps.loss == pytest.approx(np.repeat(losses, 2), rel=1e-6)
    assert steps.scale.tolist() == [256.0, 256.0, 256.0, 256.0, 128.0, 128.0]
    assert [names(run, ids) for ids in steps.nonfinite] == [[], [], [], ["2.bias"], [], []]
    assert names(run, run.meta["optimizers"][1]["params"]) == ["2.weight", "2.bias"]


def test_a_loss_and_an_input_that_are_not_finite_are_flagged(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        for spoil_input, spoil_loss in ((False, False), (True, False), (False, True)):
            optimizer.zero_grad()
            x = batch()
            if spoil_input:
                x[0, 0] = torch.nan
            loss = model(x).square().mean()
            (loss * torch.inf if spoil_loss else loss).backward()
            optimizer.zero_grad()  # or the weights would not be finite either
            optimizer.step()

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.input_finite.tolist() == [1, 0, 1]
    assert steps.loss_finite.tolist() == [1, 0, 0]
    assert math.isnan(steps.loss[1])
    assert math.isinf(steps.loss[2])


def test_what_one_module_hands_to_another_is_not_the_input(tmp_path: Path) -> None:
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        for factor in (1.0, torch.inf):
            out = model(batch()) * factor
            criterion(out, torch.zeros_like(out)).backward()
            optimizer.zero_grad()
            optimizer.step()

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.input_finite.tolist() == [1, 1]
    assert steps.loss_finite.tolist() == [1, 0]


def test_a_penalty_on_gradients_does_not_count_as_a_second_loss(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []

    def train() -> None:
        loss = model(batch()).square().mean()
        grads = torch.autograd.grad(s.scale(loss), list(model.parameters()), create_graph=True)
        penalty = sum((grad / s.get_scale()).square().sum() for grad in grads)
        losses.append((loss + penalty).item())
        s.scale(loss + penalty).backward()
        s.step(optimizer)
        s.update()

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.num_micro_steps.tolist() == [1]
    assert steps.loss.tolist() == losses


def test_the_losses_of_a_sum_of_scaled_losses_are_all_found(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []

    def train() -> None:
        parts = [model(batch(i)).square().mean() for i in range(20)]
        losses.extend(part.item() for part in parts)
        sum(s.scale(part) for part in parts).backward()  # type: ignore[union-attr]
        s.step(optimizer)
        s.update()

    steps = record(tmp_path / "run", train, model=model).steps
    assert steps.loss == pytest.approx([np.mean(losses)])
    assert steps.scaled.tolist() == [True]


def test_a_parameter_without_a_gradient_is_told_from_one_whose_gradient_is_zero(tmp_path: Path) -> None:
    model = net()
    unused = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1)

    def train() -> None:
        for used in (False, True):
            optimizer.zero_grad(set_to_none=True)
            loss = model(batch()).square().mean()
            (loss + 0 * unused(batch()).sum() if used else loss).backward()
            optimizer.step()

    _, amax = record(tmp_path / "run", train, model=model).steps.param_matrix(0)
    assert (amax[0, 4:] == -1).all()
    assert (amax[1, 4:] == 0).all()
    assert (amax[:, :4] > 0).all()


def test_a_parameter_added_later_comes_last_and_leaves_the_others_their_places(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def train() -> None:
        step(model, optimizer)
        optimizer.add_param_group({"params": model[0].parameters()})
        step(model, optimizer)

    run = record(tmp_path / "run", train, model=model)
    assert names(run, run.meta["optimizers"][0]["params"]) == ["2.weight", "2.bias", "0.weight", "0.bias"]
    assert [len(row) for row in run.steps.param_amax] == [2, 4]


def test_a_layer_unfrozen_on_the_way_is_trainable(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        step(model, optimizer)
        model[0].weight.requires_grad_(True)
        step(model, optimizer)

    params = by_name(record(tmp_path / "run", train, model=model), "param_grad")
    assert {name: tensor.trainable for name, tensor in params.items()} == {
        "0.weight": True, "0.bias": False, "2.weight": True, "2.bias": True,
    }  # fmt: skip


def test_a_sparse_gradient_counts_as_the_sum_of_its_duplicates(tmp_path: Path) -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)

    def train() -> None:
        embedding(torch.tensor([1, 1, 1, 4])).sum().backward()
        optimizer.step()

    run = record(tmp_path / "run", train, model=embedding)
    assert run.steps.param_amax[0].tolist() == [3.0]
    rows = run.samples(tensors=[by_name(run, "param_grad")["weight"].id])
    assert rows.numel.tolist() == [15]
    assert rows.num_zero.tolist() == [9]


def test_a_scalers_settings_are_those_it_had_and_say_where_they_came_from(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaded, huge = scaler(), scaler(init_scale=math.inf, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    loaded.load_state_dict({**loaded.state_dict(), "scale": 32.0, "_growth_tracker": 5})

    def train() -> None:
        step(model, optimizer, loaded)
        step(model, optimizer, huge)
        fresh = scaler()
        fresh.load_state_dict(loaded.state_dict())
        step(model, optimizer, fresh)

    first, second, third = record(tmp_path / "run", train, model=model).meta["scalers"]
    assert first["loaded"]
    assert third["loaded"]
    assert (second["growth_factor"], second["backoff_factor"], second["growth_interval"]) == (4.0, 0.25, 7)
    assert second["init_scale"] > 1e300  # JSON has no infinity
    assert not second["loaded"]
