"""What the call-order log says of each call beside its place: whose gradients, which scaler, which numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradaudit
from gradaudit.capture.callsite import shorten
from gradaudit.store import open_run
from tests.unit.capture.trainings import WIDTH, batch, net, record, scaler, step

HERE = shorten(__file__)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}")]
    return found


def logged(folder: Path, train: Callable[[], Any], *names: str, model: nn.Module | None = None) -> list[dict[str, Any]]:
    """Events of some names, details decoded."""
    events = [event for event in record(folder, train, model=model).events() if event["name"] in names]
    return [{**event, "detail": event["detail"] and json.loads(event["detail"])} for event in events]


def test_constructors_are_events_and_keep_their_lines(tmp_path: Path) -> None:
    class Mine(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.25)

    model = net()

    def train() -> None:
        optimizer = Mine(model.parameters())  # optimizer made here
        s = torch.amp.GradScaler("cpu", init_scale=16.0)  # scaler made here
        off = torch.amp.GradScaler("cpu", enabled=False)
        assert not off.is_enabled()
        step(model, optimizer, s)

    run = record(tmp_path / "run", train)
    made = [e for e in run.events() if e["name"] in ("optimizer", "GradScaler")]
    assert [(e["name"], e["optimizer"], e["scaler"]) for e in made] == [
        ("optimizer", 0, None), ("GradScaler", None, 0), ("GradScaler", None, 1),
    ]  # fmt: skip
    assert [json.loads(e["detail"]) for e in made] == [
        {"class": "Mine"},
        {"requested": True, "enabled": True, "device": "cpu"},
        {"requested": False, "enabled": False, "device": "cpu"},
    ]
    assert made[0]["line"] == run.meta["optimizers"][0]["line"] == line_of("optimizer made here")
    assert made[1]["line"] == run.meta["scalers"][0]["line"] == line_of("scaler made here")
    assert run.meta["optimizers"][0]["file"] == HERE
    assert run.meta["optimizers"][0]["lr"] == 0.25


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a scaler without a device is on where there is CUDA")
def test_a_scaler_that_turned_itself_off_shows_what_was_asked_for(tmp_path: Path) -> None:
    (made,) = logged(tmp_path / "run", torch.amp.GradScaler, "GradScaler")
    assert made["detail"] == {"requested": True, "enabled": False, "device": "cuda"}


def test_an_optimizer_that_is_never_used_takes_no_turn_in_sampling(tmp_path: Path) -> None:
    model = net()

    def train() -> None:
        unused = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(3)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(9):
            step(model, optimizer, i=i)
        assert unused

    run = record(tmp_path / "run", train, every=4)
    assert run.steps.step[run.steps.sampled].tolist() == [0, 4, 8]
    assert set(run.steps.optimizer.tolist()) == {3}
    assert [entry["params"] for entry in run.meta["optimizers"][:3]] == [[], [], []]


def test_a_learning_rate_and_a_state_are_read_at_the_first_use(tmp_path: Path) -> None:
    model = net()
    old = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, old)

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        optimizer.load_state_dict(old.state_dict())
        s = scaler()
        s.set_growth_interval(7)
        step(model, optimizer, s)

    run = record(tmp_path / "run", train)
    assert (run.meta["optimizers"][0]["resumed"], run.meta["optimizers"][0]["lr"]) == (True, 0.1)
    assert run.meta["scalers"][0]["growth_interval"] == 7
    assert run.meta["scalers"][0]["fresh"]


def test_asking_for_the_scale_is_logged_where_the_user_asks(tmp_path: Path) -> None:
    s = scaler()

    def train() -> None:
        s.scale(torch.ones(1))
        s.get_scale()  # asked here
        s.state_dict()

    (asked,) = logged(tmp_path / "run", train, "scaler.get_scale")
    assert (asked["line"], asked["scaler"]) == (line_of("asked here"), 0)


def test_backward_says_whose_gradients_it_filled_and_by_which_scaler(tmp_path: Path) -> None:
    def train() -> None:
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (first, second)]
        scalers = [scaler(), scaler()]
        for keep in (False, True):
            scalers[0].scale(first(batch()).mean()).backward()
            scalers[1].scale(second(batch()).mean()).backward()
            (first(second(batch())).mean() * 1.0).backward()
            for module in (first, second):
                for param in module.parameters():
                    param.grad = param.grad if keep else None  # unseen by any wrapped call
        assert optimizers

    found = logged(tmp_path / "run", train, "backward")
    assert [(e["optimizers"], e["scaler"], e["scaled"]) for e in found] == [
        ([0], 0, True), ([1], 1, True), ([0, 1], None, False),
    ] * 2  # fmt: skip


def test_whose_gradients_are_filled_is_unknown_before_the_optimizer_is(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            model(batch()).mean().backward()
            optimizer.step()
        batch().requires_grad_().sum().backward()

    found = logged(tmp_path / "run", train, "backward", model=model)
    assert [e["optimizers"] for e in found] == [None, [0], None]


def test_where_every_optimizer_was_seen_made_backward_can_be_said_to_fill_none(tmp_path: Path) -> None:
    def train() -> None:
        torch.optim.SGD(net().parameters(), lr=0.1)
        kept = torch.optim.SGD(net().parameters(), lr=0.1)
        batch().requires_grad_().sum().backward()
        assert kept

    (found,) = logged(tmp_path / "run", train, "backward")
    assert found["optimizers"] == []


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (lambda loss: loss * 4096.0, 4096.0),
        (lambda loss: 4096 * loss / 4, 4096.0),
        (lambda loss: loss / 4 * torch.tensor(1024.0), 1024.0),
        (lambda loss: (loss * 0.5).half() * 512.0, 512.0),
        (lambda loss: loss * float("inf"), "inf"),
        (lambda loss: loss / 4, None),
        (lambda loss: loss * loss, None),
        (lambda loss: loss + 4096.0, None),
        (lambda loss: loss * torch.tensor([[2.0, 3.0]]).sum(1).expand(1).reshape(()), 5.0),
    ],
)
def test_a_loss_scaled_by_hand_shows_its_factor(tmp_path: Path, scale: Any, factor: Any) -> None:
    model = net()
    (found,) = logged(tmp_path / "run", lambda: scale(model(batch()).mean()).backward(), "backward", model=model)
    assert found["detail"] == (None if factor is None else {"factor": factor})
    assert found["scaled"] is False


def test_a_factor_is_found_without_running_the_users_hooks_on_saved_tensors(tmp_path: Path) -> None:
    model, unpacked = net(), []

    def train() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(1) or t):
            loss = model(batch()).mean() * 8.0
        with gradaudit.attach(model, out=tmp_path / "run"):
            torch.autograd.backward(loss)

    train()
    watched = len(unpacked)
    unpacked.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(1) or t):
        loss = model(batch()).mean() * 8.0
    loss.backward()
    assert watched == len(unpacked) > 0


def test_a_loss_without_a_graph_and_what_torch_says_of_it(tmp_path: Path) -> None:
    model, s = net(), scaler()

    def train() -> None:
        with pytest.raises(RuntimeError), torch.no_grad():
            s.scale(model(batch()).mean()).backward()

    (found,) = logged(tmp_path / "run", train, "backward", model=model)
    assert found["detail"] == {"no_grad_fn": True}
    assert found["raised"].startswith("RuntimeError: element 0 of tensors does not require grad")


def test_what_torch_raises_in_a_scaler_is_part_of_its_event(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with pytest.raises(AssertionError, match="_scale is None"):
            s.update()
        s.scale(model(batch()).mean()).backward()
        s.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            s.unscale_(optimizer)
        s.step(optimizer)
        with pytest.raises(RuntimeError, match="step\\(\\) has already"):
            s.step(optimizer)
        s.update()

    found = logged(tmp_path / "run", train, "scaler.unscale_", "scaler.step", "scaler.update", model=model)
    assert [(e["name"], (e["raised"] or "")[:34]) for e in found] == [
        ("scaler.update", "AssertionError: Attempted update bu"[:34]),
        ("scaler.unscale_", ""), ("scaler.unscale_", "RuntimeError: unscale_() has alrea"),
        ("scaler.step", ""), ("scaler.step", "RuntimeError: step() has already b"), ("scaler.update", ""),
    ]  # fmt: skip
    assert [e["seq"] for e in found] == sorted(e["seq"] for e in found)


def test_a_scale_that_is_set_is_in_the_event(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for new_scale in (4.0, torch.tensor(8.0)):
            s.scale(model(batch()).mean()).backward()
            s.step(optimizer)
            s.update(new_scale)

    found = logged(tmp_path / "run", train, "scaler.update", model=model)
    assert [e["detail"] for e in found] == [{"new_scale": 4.0}, {"new_scale": 8.0}]


def test_clipping_says_whom_by_what_and_what_became_of_an_inf(tmp_path: Path) -> None:
    model, other, s = net(), nn.Linear(WIDTH, 1), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    idle = torch.optim.SGD(other.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad(), idle.zero_grad()
        s.scale(model(batch()).square().mean()).backward()
        model[0].bias.grad[0] = torch.inf
        nn.utils.clip_grad_value_((param for param in model.parameters()), clip_value=2.0)
        nn.utils.clip_grad_norm_(model.parameters(), torch.tensor(1.0))
        s.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        nn.utils.clip_grad_norm_(other.parameters(), 3)

    clips = logged(tmp_path / "run", train, "clip_grad_value_", "clip_grad_norm_", "clip_grads_with_norm_", model=model)
    assert [e["optimizers"] for e in clips] == [[0], [0], [0], [1]]
    assert [e["scaled"] for e in clips] == [True, True, False, True]
    details = [e["detail"] for e in clips]
    assert [d["limit"] for d in details] == [2.0, 1.0, 0.5, 3.0]
    assert [d["limit_is_tensor"] for d in details] == [False, True, False, False]
    assert details[0]["norm"] is None
    assert 1.0 < details[1]["norm"] < 100.0
    assert details[2]["norm"] == pytest.approx(1 / 256, rel=1e-3)
    assert details[3]["norm"] == 0.0
    assert [(d["nonfinite_before"], d["nonfinite_after"]) for d in details] == [
        (True, False), (False, False), (None, None), (False, False),
    ]  # fmt: skip


def test_an_empty_generator_of_parameters_is_warned_of_as_ever(tmp_path: Path) -> None:
    with gradaudit.attach(net(), out=tmp_path / "run"):
        with pytest.warns(UserWarning, match="empty generator"):
            nn.utils.clip_grad_norm_((p for p in ()), 1.0)
        with pytest.raises(TypeError):
            nn.utils.clip_grad_norm_(3, 1.0)  # type: ignore[arg-type]
        param = nn.Parameter(torch.ones(1))
        param.grad = torch.full((1,), torch.nan)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    run = open_run(tmp_path / "run")
    assert run.meta["errors"] == []
    assert [event["raised"] is None for event in run.events()] == [True, False, False]


@pytest.mark.parametrize(
    ("unscale", "unscaled"),
    [
        (lambda grad, scale: grad, False),
        (lambda grad, scale: grad / scale, True),
        (lambda grad, scale: grad.float() * (1.0 / scale), True),
        (lambda grad, scale: grad * torch.tensor(1.0 / scale), True),
        (lambda grad, scale: grad * torch.linspace(0, 1, grad.shape[-1]), False),
    ],
)
def test_a_penalty_on_gradients_of_a_scaled_loss_says_whether_they_were_unscaled(
    tmp_path: Path, unscale: Any, unscaled: bool
) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        loss = model(batch()).square().mean()
        grads = torch.autograd.grad(s.scale(loss), list(model.parameters()), create_graph=True)
        penalty = sum(unscale(grad, s.get_scale()).square().sum() for grad in grads)
        s.scale(loss + penalty).backward()
        s.step(optimizer)
        s.update()
        s.scale(model(batch()).mean()).backward()  # none of the next step's business

    found = logged(tmp_path / "run", train, "penalty", "autograd.grad", model=model)
    assert [e["name"] for e in found] == ["autograd.grad", "penalty"]
    assert (found[0]["detail"], found[0]["scaled"], found[0]["scaler"]) == ({"create_graph": True}, True, 0)
    assert (found[1]["detail"], found[1]["scaler"]) == ({"unscaled": unscaled}, 0)


def test_gradients_of_a_plain_loss_are_no_scaled_penalty(tmp_path: Path) -> None:
    model, s = net(), scaler()

    def train() -> None:
        loss = model(batch()).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        s.scale(loss + sum(grad.square().sum() for grad in grads)).backward()

    found = logged(tmp_path / "run", train, "penalty", "autograd.grad", model=model)
    assert [(e["name"], e["scaled"]) for e in found] == [("autograd.grad", False)]


@pytest.mark.parametrize("case", ["frozen", "replaced", "not run", "detached", "used"])
def test_a_step_without_any_gradient_says_what_its_parameters_are(tmp_path: Path, case: str) -> None:
    model, s = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), scaler()
    params = list(model[0].parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    if case == "frozen":
        model[0].requires_grad_(False)
    if case == "replaced":
        model[0] = nn.Linear(WIDTH, WIDTH)

    def train() -> None:
        x = batch() if case == "not run" else model[0](batch())
        s.scale(model[1](x.detach() if case == "detached" else x).mean()).backward()
        with nullcontext() if case == "used" else pytest.raises(AssertionError, match="No inf checks"):
            s.step(optimizer)

    (found,) = logged(tmp_path / "run", train, "scaler.step", model=model)
    numbers = {"num_params": 2, "num_frozen": 0, "num_unowned": 0, "modules_run": 1, "modules_not_run": []}
    expected = {
        "frozen": {"num_frozen": 2},
        "replaced": {"num_unowned": 2, "modules_run": 0},
        "not run": {"modules_run": 0, "modules_not_run": ["0"]},
        "detached": {},
    }
    assert found["detail"] == (None if case == "used" else {**numbers, **expected[case]})
