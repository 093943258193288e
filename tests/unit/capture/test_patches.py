"""The call-order log, and the wrapped calls it comes from."""

from __future__ import annotations

import inspect
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_ as clip_by_name

import gradaudit
from gradaudit.capture.callsite import shorten, user_call_site, variable_name
from gradaudit.store import Run, open_run
from tests.unit.capture.trainings import batch, net, record, scaler, step


def calls(run: Run) -> list[tuple[str, int | None]]:
    return [(event["name"], event["optimizer"]) for event in run.events()]


def detail(event: dict[str, Any]) -> Any:
    return json.loads(event["detail"])


def line_of(text: str) -> int:
    """Line in this file that holds a text, the marker's own line excepted."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}")]
    return found


def test_calls_are_logged_in_order_with_the_state_of_the_gradients(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def train() -> None:
        optimizer.zero_grad()
        s.scale(model(batch()).square().mean()).backward()
        nn.utils.clip_grad_value_(model.parameters(), clip_value=0.5)
        s.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        s.step(optimizer)
        s.update()
        schedule.step()

    run = record(tmp_path / "run", train, model=model)
    events = run.events()
    assert calls(run) == [
        ("optimizer.zero_grad", 0), ("scaler.scale", None), ("backward", None), ("clip_grad_value_", None),
        ("scaler.unscale_", 0), ("clip_grad_norm_", None), ("scaler.step", 0), ("scaler.update", None),
        ("lr_scheduler.step", 0),
    ]  # fmt: skip
    assert [event["seq"] for event in events] == list(range(9))
    by_name = {event["name"]: event for event in events}
    assert by_name["backward"]["scaled"]
    assert by_name["clip_grad_value_"]["scaled"]
    assert detail(by_name["clip_grad_value_"])["limit"] == 0.5
    assert detail(by_name["clip_grad_norm_"])["limit"] == 1.0
    assert by_name["scaler.unscale_"]["scaled"]
    assert not by_name["scaler.step"]["scaled"]
    assert [event["step"] for event in events] == [0] * 7 + [1, 1]
    assert [event["micro_step"] for event in events] == [0, 0, 1, 1, 1, 1, 1, 0, 0]


def test_gradients_are_known_to_be_unscaled_after_unscaling(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for unscale in (True, False):
            s.scale(model(batch()).square().mean()).backward()
            if unscale:
                s.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            s.step(optimizer)
            s.update()

    run = record(tmp_path / "run", train, model=model)
    clips = [event for event in run.events() if event["name"] == "clip_grad_norm_"]
    assert [event["scaled"] for event in clips] == [False, True]


def test_the_users_line_is_noted_for_every_call(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(5):
            loss = model(batch()).square().mean()
            scaled = s.scale(loss)  # scaled here
            scaled.backward()  # backward here
            clip_grad = nn.utils.clip_grad_norm_
            clip_grad(model.parameters(), 1.0)  # clipped here
            s.step(optimizer)  # stepped here
            s.update()  # updated here

    run = record(tmp_path / "run", train, model=model)
    for name, marker in (
        ("scaler.scale", "scaled here"), ("backward", "backward here"), ("clip_grad_norm_", "clipped here"),
        ("scaler.step", "stepped here"), ("scaler.update", "updated here"),
    ):  # fmt: skip
        found = [(event["file"], event["line"]) for event in run.events() if event["name"] == name]
        assert found == [(shorten(__file__), line_of(marker))] * 5


def test_names_imported_before_gradaudit_came_are_seen_where_they_are_methods(tmp_path: Path) -> None:
    model, s = net(), GradScaler("cpu", init_scale=16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        s.scale(model(batch()).mean()).backward()
        clip_by_name(model.parameters(), 1.0)
        s.step(optimizer)

    names = [name for name, _ in calls(record(tmp_path / "run", train, model=model))]
    assert names == ["scaler.scale", "backward", "scaler.step"]


def test_a_subclass_that_overrides_a_method_counts_its_calls_once(tmp_path: Path) -> None:
    class Early(torch.amp.GradScaler):
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return super().step(optimizer, *args, **kwargs)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        class Late(Early):
            def scale(self, outputs: Any) -> Any:
                return super().scale(outputs)

            def update(self, new_scale: Any = None) -> None:
                super().update(new_scale)

        for cls in (Early, Late):
            step(model, optimizer, cls("cpu", init_scale=8.0))
        assert "__wrapped__" in vars(vars(Late)["update"])

    run = record(tmp_path / "run", train, model=model)
    counted = [name for name, _ in calls(run) if name.startswith("scaler.")]
    assert counted == ["scaler.scale", "scaler.step", "scaler.update"] * 2
    assert [entry["class"] for entry in run.meta["scalers"]] == ["Early", "Late"]
    assert len(run.steps) == 2


def test_a_disabled_scaler_leaves_the_log_to_the_optimizer(tmp_path: Path) -> None:
    model, s = net(), scaler(enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(tmp_path / "run", lambda: step(model, optimizer, s), model=model)
    assert [name for name, _ in calls(run)] == ["optimizer.zero_grad", "scaler.scale", "backward", "optimizer.step"]
    assert run.meta["scalers"][0]["enabled"] is False


def test_autocast_regions_are_noted_once_each_with_their_line(tmp_path: Path) -> None:
    def train() -> None:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):  # half here
                pass
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                pass

    regions = record(tmp_path / "run", train, model=net()).meta["autocast"]
    assert [(entry["dtype"], entry["enabled"]) for entry in regions] == [("float16", True), ("bfloat16", False)]
    assert regions[0]["file"] == shorten(__file__)
    assert regions[0]["line"] == line_of("half here")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_autocast_region_that_torch_turns_off_was_asked_for(tmp_path: Path) -> None:
    def train() -> None:
        for _ in range(3):
            with torch.autocast("cpu", torch.float64):  # no such autocast
                pass
            with torch.autocast("cpu", dtype=torch.float64, enabled=False):
                pass

    regions = record(tmp_path / "run", train, model=net()).meta["autocast"]
    asked = {"device": "cpu", "dtype": "float64", "enabled": False, "requested": True}
    assert regions == [{**asked, "file": shorten(__file__), "line": line_of("no such autocast")}]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_constructor_of_a_scheduler_is_not_a_step(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = torch.optim.lr_scheduler

    def train() -> None:
        optimizer.step()
        for schedule in (
            schedulers.StepLR(optimizer, 3),
            schedulers.OneCycleLR(optimizer, 1.0, total_steps=10),
            schedulers.SequentialLR(
                optimizer, [schedulers.ConstantLR(optimizer), schedulers.StepLR(optimizer, 2)], [2]
            ),
        ):
            schedule.step()
        schedulers.ReduceLROnPlateau(optimizer).step(0.5)

    run = record(tmp_path / "run", train, model=model)
    outer = [name for name, _ in calls(run) if name == "lr_scheduler.step"]
    assert len(outer) == 4


def test_wrapped_calls_keep_their_names_signatures_and_results(tmp_path: Path) -> None:
    before = {function: inspect.signature(function) for function in (torch.autograd.backward, nn.utils.clip_grad_norm_)}
    model, s = net(), scaler()
    with gradaudit.attach(model, out=tmp_path / "run"):
        for function, signature in before.items():
            wrapped = getattr(inspect.getmodule(function), function.__name__)
            assert wrapped is not function
            assert inspect.signature(wrapped) == signature
            assert wrapped.__doc__ == function.__doc__
        model(batch()).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        assert norm.shape == ()
        values = (torch.ones(1), [torch.ones(2)])
        scaled = s.scale(values)
        assert isinstance(scaled, tuple)
        assert isinstance(scaled[1], list)
        assert [float(x) for x in s.scale(iter([torch.ones(())]))] == [256.0]


def test_bad_arguments_raise_what_torch_raises(tmp_path: Path) -> None:
    with gradaudit.attach(net(), out=tmp_path / "run"):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'max_norm'"):
            nn.utils.clip_grad_norm_([])  # type: ignore[call-arg]
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).backward()
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
            scaler().scale(3)  # type: ignore[call-overload]
    assert open_run(tmp_path / "run").meta["errors"] == []


def test_somebody_elses_wrapper_around_ours_stays_theirs(tmp_path: Path) -> None:
    original = torch.autograd.backward
    model = net()
    with gradaudit.attach(model, out=tmp_path / "run"):
        ours = torch.autograd.backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        torch.autograd.backward = theirs  # type: ignore[assignment]
    try:
        assert torch.autograd.backward is theirs
        model(batch()).mean().backward()  # goes through ours, which does nothing any more
    finally:
        torch.autograd.backward = original


def test_a_call_site_is_the_innermost_line_of_the_users() -> None:
    file, line = user_call_site()  # this very line
    assert file == shorten(__file__)
    assert line == line_of("this very line")


def test_where_only_libraries_call_the_innermost_of_them_is_named() -> None:
    scope: dict[str, Any] = {"user_call_site": user_call_site}
    exec(
        compile("def inner():\n    found.append(user_call_site())", "/x/site-packages/lightning/loop.py", "exec"), scope
    )
    exec(compile("def outer():\n    inner()", "/x/site-packages/lightning/trainer.py", "exec"), scope)
    found = scope["found"] = []
    thread = threading.Thread(target=scope["outer"])  # whose stack has nothing of ours
    thread.start()
    thread.join()
    assert found == [("/x/site-packages/lightning/loop.py", 2)]


def test_paths_below_the_working_directory_are_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shorten(str(tmp_path / "src" / "train.py")) == str(Path("src") / "train.py")
    assert shorten("/elsewhere/train.py") == "/elsewhere/train.py"


def test_a_variable_is_found_by_identity_and_private_names_are_passed_over() -> None:
    thing, _hidden = object(), object()
    assert variable_name(thing) == "thing"
    assert variable_name(_hidden) is None
    found = variable_name(object())
    assert found is None
