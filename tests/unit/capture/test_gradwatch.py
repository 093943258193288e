"""Changes of gradients that no call of the log explains: seen, measured, and their line found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_by_name
from torch.nn.utils import clip_grad_value_ as clip_value_by_name

from gradaudit.capture.callsite import shorten
from gradaudit.capture.order.gradwatch import Change, Reading, kind_of_change, state_of
from gradaudit.capture.order.linewatch import LineWatch
from tests.unit.capture.trainings import batch, net, record, scaler

HERE = shorten(__file__)

Change_ = Callable[[nn.Module], object]

no_tracer = pytest.mark.usefixtures("untraced")


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}")]
    return found


def changes(
    folder: Path, change: Change_, *, num_steps: int = 3, every: int = 100, scaled: bool = True, unscale: bool = False
) -> list[dict[str, Any]]:
    """Train with `change` called between backward and step; returns the `gradients.changed` events."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    s = scaler(enabled=scaled)

    def train() -> None:
        for i in range(num_steps):
            optimizer.zero_grad()
            s.scale(model(batch(i)).square().mean()).backward()
            if unscale:
                s.unscale_(optimizer)
            change(model)
            s.step(optimizer)
            s.update()

    events = record(folder, train, model=model, every=every).events()
    found = [event for event in events if event["name"] == "gradients.changed"]
    for event in found:
        later = [other["name"] for other in events if other["seq"] > event["seq"]]
        assert later[0] == ("scaler.step" if scaled else "optimizer.step")
    return [{**event, "detail": json.loads(event["detail"])} for event in found]


def halve(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)  # method


def halve_by_operator(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad *= 0.5  # operator
    assert model


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 0.5  # assignment


def clip(model: nn.Module) -> None:
    before = 1
    clip_by_name(model.parameters(), 1.0)  # imported
    assert before


@no_tracer
@pytest.mark.parametrize(
    ("change", "marker", "kind"),
    [
        (halve, "method", "in-place"), (halve_by_operator, "operator", "in-place"), (replace, "assignment", "replaced"),
        (clip, "imported", "in-place"),
    ],
)  # fmt: skip
def test_a_change_by_hand_is_seen_measured_and_its_line_found(
    tmp_path: Path, change: Change_, marker: str, kind: str
) -> None:
    found = changes(tmp_path / "run", change)
    assert [event["step"] for event in found] == [0, 1, 2]
    assert all(event["scaled"] and event["optimizer"] == 0 for event in found)
    assert [event["detail"]["kind"] for event in found] == [kind] * 3
    # the first change comes as a surprise: nobody followed the lines yet
    assert [(event["file"], event["line"]) for event in found] == [(None, None)] + [(HERE, line_of(marker))] * 2
    for event in found:
        detail = event["detail"]
        if change is clip:
            assert detail["norm_after"] == pytest.approx(1.0, rel=1e-4)
            assert detail["factor_min"] == pytest.approx(detail["factor_max"], rel=1e-4)
        else:
            assert detail["factor_min"] == detail["factor_max"] == 0.5
            assert detail["norm_after"] == pytest.approx(detail["norm_before"] / 2)
            assert detail["amax_after"] == detail["amax_before"] / 2
        assert detail["nonfinite_before"] is detail["nonfinite_after"] is False


def test_clipping_by_value_and_what_it_hides(tmp_path: Path) -> None:
    def spoil_and_clip(model: nn.Module) -> None:
        clip_value_by_name(model.parameters(), 0.25)

    model = net()
    optimizer, s = torch.optim.SGD(model.parameters(), lr=0.01), scaler()

    def train() -> None:
        for i in range(2):
            optimizer.zero_grad()
            loss = model(batch(i)).square().mean()
            if i == 1:
                model[2].bias.register_hook(lambda grad: grad * torch.inf)
            s.scale(loss).backward()
            spoil_and_clip(model)
            s.step(optimizer)
            s.update()

    events = record(tmp_path / "run", train, model=model, every=1).events()
    found = [json.loads(event["detail"]) for event in events if event["name"] == "gradients.changed"]
    assert [detail["amax_after"] for detail in found] == [0.25, 0.25]
    assert 0 < found[0]["factor_min"] < found[0]["factor_max"] <= 1
    assert [(d["nonfinite_before"], d["nonfinite_after"]) for d in found] == [(False, False), (True, False)]
    assert found[1]["norm_before"] == "inf"


def test_what_is_done_behind_torchs_back_shows_on_sampled_steps(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.data.clamp_(-0.5, 0.5)

    found = changes(tmp_path / "run", change, num_steps=8, every=3)
    # once it was seen the following steps are measured too
    assert [event["step"] for event in found] == list(range(8))
    assert {event["detail"]["kind"] for event in found} == {"in-place"}
    assert {event["detail"]["amax_after"] for event in found} == {0.5}


def test_only_so_many_steps_are_measured(tmp_path: Path) -> None:
    found = changes(tmp_path / "run", halve, num_steps=26)
    measured = [event["detail"]["factor_min"] is not None for event in found]
    assert measured == [True] * 21 + [False] * 5 or measured == [True] * 20 + [False] * 6
    assert [event["step"] for event in found] == list(range(26))


@pytest.mark.parametrize("change", [
    lambda model: None,
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    lambda model: [param.grad.norm().item() for param in model.parameters()],
    lambda model: [param.grad.clone().mul_(2) for param in model.parameters()],
], ids=["nothing", "clip_grad_norm_", "clip_grad_value_", "looking", "copies"])  # fmt: skip
@pytest.mark.parametrize("every", [1, 100])
def test_known_calls_and_looks_are_no_changes(tmp_path: Path, change: Change_, every: int) -> None:
    assert changes(tmp_path / "run", change, every=every) == []


def test_after_unscaling_everybody_may_clip(tmp_path: Path) -> None:
    assert changes(tmp_path / "run", clip, unscale=True) == []


def test_gradients_that_were_never_scaled_are_said_to_be_so(tmp_path: Path) -> None:
    found = changes(tmp_path / "run", clip, scaled=False)
    assert [event["scaled"] for event in found] == [False] * 3
    assert [event["line"] for event in found] == [None] * 3


@pytest.mark.parametrize("every", [1, 100])
def test_accumulation_two_losses_and_emptied_gradients_are_no_changes(tmp_path: Path, every: int) -> None:
    model, s = net(), scaler()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.01) for i in (0, 2)]

    def train() -> None:
        for i in range(4):
            for k in range(3):
                s.scale(model(batch(3 * i + k)).square().mean() / 3).backward()
            for optimizer in optimizers:
                s.step(optimizer)
            s.update()
            if i % 2:
                model.zero_grad(set_to_none=i == 1)
            else:
                for param in model.parameters():
                    param.grad = None

    names = {event["name"] for event in record(tmp_path / "run", train, model=model, every=every).events()}
    assert "gradients.changed" not in names


@no_tracer
def test_the_search_for_a_line_leaves_no_trace(tmp_path: Path) -> None:
    seen: list[Any] = []

    def change(model: nn.Module) -> None:
        seen.append(sys.gettrace())
        halve(model)
        seen.append(sys.gettrace())

    frame = sys._getframe()
    changes(tmp_path / "run", change)
    assert [trace is not None for trace in seen] == [False, False, True, False, False, False]
    assert frame.f_trace is None
    assert sys.gettrace() is None


@no_tracer
def test_a_tracer_of_the_users_is_left_alone(tmp_path: Path) -> None:
    def theirs(frame: Any, event: str, arg: Any) -> None:
        return None

    seen = []

    def change(model: nn.Module) -> None:
        seen.append(sys.gettrace())
        halve(model)

    sys.settrace(theirs)
    try:
        found = changes(tmp_path / "run", change)
        assert sys.gettrace() is theirs
    finally:
        sys.settrace(None)
    assert seen == [theirs] * 3
    assert [event["line"] for event in found] == [None] * 3


@no_tracer
def test_a_search_whose_step_never_comes_ends_with_the_recording(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for i in range(2):
            s.scale(model(batch(i)).square().mean()).backward()
            if i == 0:
                halve(model)
                s.step(optimizer)
                s.update()

    record(tmp_path / "run", train, model=model)
    assert sys.gettrace() is None


@no_tracer
def test_lines_are_followed_through_calls_and_returns() -> None:
    value = [0]

    def helper() -> None:
        len(value)

    def watch(act: Callable[[], object]) -> int | None:
        value[0] = 0
        lines = LineWatch(lambda: value[0])
        lines.start()
        try:
            act()
        finally:
            lines.stop()
        return None if lines.found is None else lines.found[1]

    def after_a_call() -> None:
        helper(), value.__setitem__(0, 1)  # same line
        helper()

    def in_a_library() -> None:
        json.dumps({"a": 1}, default=str)
        sorted([1], key=lambda i: value.__setitem__(0, i) or i)  # through sorted
        helper()

    assert watch(after_a_call) == line_of("same line")
    assert watch(in_a_library) == line_of("through sorted")
    assert watch(helper) is None


@no_tracer
def test_a_fingerprint_that_fails_ends_the_search_not_the_training() -> None:
    calls = []

    def fingerprint() -> int:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError
        return 0

    lines = LineWatch(fingerprint)
    lines.start()
    reached = 1
    lines.stop()
    assert reached
    assert sys.gettrace() is None
    assert lines.found is None


def test_states_tell_replaced_from_changed_and_taken_away() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param, nn.Parameter(torch.ones(1))], lr=0.1)
    empty = state_of(optimizer)
    param.grad = torch.ones(2)
    first = state_of(optimizer)
    assert kind_of_change(empty, first) == "replaced"
    assert kind_of_change(first, empty) is None
    assert kind_of_change(first, state_of(optimizer)) is None
    param.grad.mul_(1)
    assert kind_of_change(first, state_of(optimizer)) == "in-place"
    with torch.inference_mode():
        param.grad = torch.ones(2)
    assert kind_of_change(first, state_of(optimizer)) == "replaced"


def test_a_change_without_readings_has_no_numbers_and_one_that_was_none_no_row() -> None:
    detail = Change("replaced").detail(torch.zeros(0).numpy())
    assert detail is not None
    assert detail["kind"] == "replaced"
    assert set(detail.values()) == {"replaced", None}
    reading = Reading(
        [0, 2], [torch.tensor(3.0), torch.tensor(torch.nan)], [torch.tensor(3.0), torch.tensor(torch.nan)]
    )
    silent = Change(None, reading, reading)
    values = torch.cat([torch.tensor(copy.numpy()) for copy in silent.copies()]).numpy()
    assert silent.detail(values) is None
    nothing_left = Reading([0, 2], [torch.tensor(0.0)] * 2, [torch.tensor(0.0)] * 2)
    gone = Change("in-place", reading, nothing_left)
    values = torch.cat([torch.tensor(copy.numpy()) for copy in gone.copies()]).numpy()
    assert gone.detail(values) == {
        "kind": "in-place", "factor_min": 0.0, "factor_max": 0.0, "norm_before": "nan", "norm_after": 0.0,
        "amax_before": 3.0, "amax_after": 0.0, "nonfinite_before": True, "nonfinite_after": False,
    }  # fmt: skip
