"""The order of calls, on logs written by hand: what is out of turn, and what only looks so."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gradaudit.analysis.calls import NO_CHECKS, NO_GRADIENTS, NO_SCALE, STEPPED_TWICE, UNSCALED_LATE, UNSCALED_TWICE
from gradaudit.analysis.calls import read_calls as read
from gradaudit.analysis.observations import Calls, Observation
from tests import factory

Call = tuple[str, dict[str, Any]]

D, G = 0, 1


def backward(*optimizers: int, scaled: bool = True, scaler: int | None = 0, **more: Any) -> Call:
    owned = list(optimizers or (0,))
    return "backward", {"optimizers": owned, "scaled": scaled, "scaler": scaler if scaled else None, **more}


def zero(optimizer: int = 0) -> Call:
    return "optimizer.zero_grad", {"optimizer": optimizer}


def unscale(optimizer: int = 0, scaler: int = 0, **more: Any) -> Call:
    return "scaler.unscale_", {"optimizer": optimizer, "scaler": scaler, "scaled": True, **more}


def step(optimizer: int = 0, scaler: int = 0, **more: Any) -> Call:
    return "scaler.step", {"optimizer": optimizer, "scaler": scaler, **more}


def update(scaler: int = 0, **more: Any) -> Call:
    return "scaler.update", {"scaler": scaler, **more}


def direct(optimizer: int = 0) -> Call:
    return "optimizer.step", {"optimizer": optimizer}


def clip(*optimizers: int, scaled: bool = True) -> Call:
    return "clip_grad_norm_", {"optimizers": list(optimizers or (0,)), "scaled": scaled}


def log(*calls: Call) -> list[dict[str, Any]]:
    """Events on the line of their position; a step ends with every step or refused call."""
    rows, at = [], 0
    for seq, (name, more) in enumerate(calls):
        rows.append(factory.event(seq, name, step=at, line=seq, **more))
        at += name in ("scaler.step", "optimizer.step")
    return rows


def seen(*calls: Call) -> list[tuple[str, int, int | None]]:
    """What was observed: kind, line of the call, line of the other one."""
    return [(o.what, o.event["line"], o.other and o.other["line"]) for o in read(log(*calls)).observations]


CYCLE = (zero(), backward(), unscale(), clip(scaled=False), step(), update())

CLEAN: dict[str, tuple[Call, ...]] = {
    "the usual cycle": CYCLE * 3,
    "without clipping": (zero(), backward(), step(), update()) * 3,
    "accumulation": (backward(), backward(), backward(), unscale(), step(), update(), zero()) * 3,
    "zero_grad at the end": (backward(), step(), update(), zero()) * 3,
    "gradients emptied by the module": (backward(), step(), update()) * 3,
    "a step given up by the script": (*CYCLE, zero(), backward(), unscale(), update(), *CYCLE),
    "the same without a visible zero_grad": (backward(), unscale(), update(), backward(), unscale(), step(), update()),
    "two optimizers, one update": (zero(D), zero(G), backward(D, G), step(D), step(G), update()) * 3,
    "two losses, one update": (zero(D), zero(G), backward(D), backward(G), unscale(D), unscale(G), step(D), step(G),
                               update()) * 3,
    "a GAN that fills the other one's gradients": (
        zero(D), backward(D, G), backward(D), step(D), zero(G), backward(D, G), step(G), update()) * 3,
    "the same with an update after each": (
        zero(D), backward(D), step(D), update(), zero(G), backward(D, G), step(G), update()) * 3,
    "the same, emptied by the modules": (
        backward(D), step(D), update(), backward(D, G), step(G), update()) * 3,
    "one scaler each": (
        zero(D), backward(D, scaler=0), step(D, 0), update(0), zero(G), backward(D, G, scaler=1), step(G, 1),
        update(1)) * 3,
    "an optimizer outside the scaler": (
        zero(D), backward(D), step(D), update(), zero(G), backward(G, scaled=False), direct(G)) * 3,
    "no scaler": (zero(), backward(scaled=False), clip(scaled=False), direct()) * 3,
    "recording began in the middle": (unscale(), step(), update(), *CYCLE),
    "backward of nobody's": (zero(), backward(optimizers=None), step(), update()) * 3,
    "a plain backward that was thrown away": (backward(scaled=False), zero(), backward(), step(), update()) * 2,
    "a backward that raised": (zero(), backward(scaled=False, raised="RuntimeError: x"), backward(), step(), update()),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_log_has_nothing_out_of_turn(name: str) -> None:
    assert seen(*CLEAN[name]) == []


def test_a_clip_of_scaled_gradients_belongs_before_the_unscale_that_came_later() -> None:
    assert seen(zero(), backward(), clip(), unscale(), step(), update()) == [("clip", 2, 3)]


def test_a_clip_without_unscale_belongs_after_the_backward() -> None:
    assert seen(zero(), backward(), clip(), step(), update()) == [("clip", 2, 1)]


def test_a_clip_whose_step_never_came_is_told_too() -> None:
    assert seen(zero(), backward(), clip()) == [("clip", 2, 1)]


def test_only_the_optimizer_that_was_not_unscaled_was_clipped_too_early() -> None:
    calls = read(log(zero(D), zero(G), backward(D, G), unscale(D), clip(D, G), step(D), step(G), update()))
    assert [(o.what, o.optimizer) for o in calls.observations] == [("clip", G)]


def test_a_clip_of_gradients_made_before_recording_began() -> None:
    assert [what for what, _, _ in seen(clip(), step(), update())] == ["clip"]


def test_a_clip_of_gradients_that_are_thrown_away_does_not_count() -> None:
    assert seen(zero(), backward(), unscale(), step(), update(), zero(), backward(), clip(), zero()) == []


def test_the_scale_read_before_a_clip_is_noted() -> None:
    first = (backward(), ("scaler.get_scale", {"scaler": 0}), clip(), step(), update())
    calls = read(log(*first, backward(), clip(), step()))
    assert [o.asked_scale for o in calls.observations] == [True, False]


def test_a_direct_step_on_scaled_gradients() -> None:
    assert seen(zero(), backward(), direct()) == [("bypass", 2, 1)]


def test_a_direct_step_after_unscale_is_the_scripts_own_business() -> None:
    assert seen(zero(), backward(), unscale(), direct(), update()) == []


def test_a_second_step_after_the_scalers() -> None:
    assert seen(zero(), backward(), step(), direct(), update()) == [("second step", 3, 2)]


def test_a_backward_of_nobodys_is_that_of_the_next_step() -> None:
    assert seen(zero(), backward(optimizers=None), direct()) == [("bypass", 2, 1)]


def test_a_plain_backward_into_gradients_that_are_unscaled() -> None:
    assert seen(zero(), backward(scaled=False), step(), update()) == [("plain backward", 1, 2)]
    assert seen(zero(), backward(), backward(scaled=False), unscale(), step(), update()) == [("plain backward", 2, 3)]


def test_a_plain_backward_after_unscale_is_right() -> None:
    assert seen(zero(), backward(), unscale(), backward(scaled=False), step(), update()) == []


def test_unscale_between_micro_batches() -> None:
    assert seen(zero(), backward(), unscale(), backward(), step(), update()) == [("backward after unscale_", 3, 2)]


def test_unscale_and_update_for_every_micro_batch() -> None:
    calls = (zero(), backward(), unscale(), update(), backward(), unscale(), step(), update())
    assert seen(*calls) == [("backward after unscale_", 4, 2)]


def test_update_between_two_optimizers_that_share_the_backward() -> None:
    calls = read(log(zero(D), zero(G), backward(D), backward(G), step(D), update(), step(G), update()))
    (one,) = calls.observations
    assert (one.what, one.event["line"], one.other and one.other["line"], one.alone) == ("update between", 5, 6, False)


def test_the_same_where_no_zero_grad_is_seen() -> None:
    assert seen(backward(D, G), step(D), update(), step(G), update()) == [("update between", 2, 3)]


def test_update_right_before_the_gradients_are_used() -> None:
    calls = read(log(zero(), backward(), update(), step(), update()))
    assert [(o.what, o.alone) for o in calls.observations] == [("update between", True)]


def refused(message: str, kind: str = "RuntimeError") -> str:
    return f"{kind}: {message}"


def test_update_without_a_step() -> None:
    calls = (zero(), backward(), update(raised=refused(NO_CHECKS, "AssertionError")))
    assert seen(*calls) == [("update without step", 2, 1)]


def test_update_after_a_direct_step_has_that_cause() -> None:
    calls = (zero(), backward(), direct(), update(raised=refused(NO_CHECKS, "AssertionError")))
    assert [what for what, _, _ in seen(*calls)] == ["bypass", "update after bypass"]


def test_nothing_was_ever_scaled() -> None:
    calls = (zero(), backward(scaled=False), step(raised=refused(f"Attempted step but {NO_SCALE}.")))
    assert seen(*calls) == [("no scale", 1, 2)]


AGAIN = refused(UNSCALED_TWICE)


def test_unscale_twice_in_a_row() -> None:
    assert seen(zero(), backward(), unscale(), unscale(raised=AGAIN)) == [("unscale_ again", 3, 2)]


def test_unscale_for_every_micro_batch() -> None:
    (one,) = read(log(zero(), backward(), unscale(), backward(), unscale(raised=AGAIN))).observations
    assert (one.what, one.num_backward) == ("unscale_ again", 2)


def test_unscale_after_step() -> None:
    calls = (*CYCLE, zero(), backward(), step(), unscale(raised=refused(UNSCALED_LATE)))
    assert seen(*calls) == [("unscale_ again", 9, 8)]


def test_an_iteration_given_up_without_update() -> None:
    left = (*CYCLE, zero(), backward(), unscale(), zero(), backward(), unscale(raised=AGAIN))
    assert seen(*left) == [("no update", 11, 8)]


def test_the_same_where_zero_grad_was_left_out_too() -> None:
    cycle = (backward(), unscale(), step(), update(), zero())
    assert seen(*cycle, backward(), unscale(), backward(), unscale(raised=AGAIN)) == [("no update", 8, 6)]


def test_step_without_update() -> None:
    late, twice = refused(UNSCALED_LATE), refused(STEPPED_TWICE)
    assert seen(zero(), backward(), step(), zero(), backward(), step(raised=twice)) == [("no update", 5, 2)]
    assert seen(zero(), backward(), step(), zero(), backward(), unscale(raised=late)) == [("no update", 5, 2)]
    assert seen(backward(), step(), backward(), step(raised=twice)) == [("no update", 3, 1)]


def test_step_twice_in_one_iteration() -> None:
    assert seen(zero(), backward(), step(), step(raised=refused(STEPPED_TWICE))) == [("step again", 3, 2)]


def test_gradients_of_another_scaler() -> None:
    assert seen(zero(), backward(scaler=1), step(scaler=0), update()) == [("other scaler", 2, 1)]
    both = (zero(), backward(scaler=0), backward(scaler=1), step(scaler=0), update())
    assert seen(*both) == [("other scaler", 3, 2)]
    unused = step(scaler=0, raised=refused(f"Attempted step but {NO_SCALE}.", "AssertionError"))
    assert seen(zero(), backward(scaler=1), unused) == [("other scaler", 2, 1)]


NOTHING = refused(NO_GRADIENTS, "AssertionError")


def test_no_gradients_and_what_came_last() -> None:
    assert seen(zero(G), backward(D), step(G, raised=NOTHING)) == [("no gradients", 2, 1)]
    assert seen(backward(), zero(), step(raised=NOTHING)) == [("no gradients", 2, 1)]
    assert seen(backward(D, G), zero(G), backward(D), step(G, raised=NOTHING)) == [("no gradients", 3, 2)]
    assert seen(step(raised=NOTHING)) == [("no gradients", 0, None)]


def test_a_fused_step_without_gradients_raises_nothing() -> None:
    assert seen(zero(), backward(G), step(detail=json.dumps({"num_params": 2}))) == [("no gradients", 2, 1)]


def test_steps_scalers_and_schedules_are_counted() -> None:
    schedule = ("lr_scheduler.step", {"optimizer": 0})
    calls = read(log(*CYCLE, schedule, schedule, *CYCLE, *CYCLE, schedule, backward(scaler=1), step(scaler=1)))
    assert calls.used == {0: 4}
    assert calls.scaled == {0}
    assert [scaler for scaler, _ in calls.scalers[0]] == [0, 1]
    assert [taken for _, taken in calls.schedules[0]] == [(0,), (1, 2)]


def test_the_last_event_of_a_name_before_another() -> None:
    calls = read(log(*CYCLE, *CYCLE))
    assert calls.last("backward", calls.named["scaler.step"][1]) is calls.named["backward"][1]
    assert calls.last("backward", calls.named["optimizer.zero_grad"][0]) is None


def test_observations_by_kind() -> None:
    calls = Calls(observations=(Observation("clip", {}, None, 0, 0), Observation("bypass", {}, None, 0, 0)))
    assert [one.what for one in calls.of("bypass")] == ["bypass"]


def test_a_million_events_take_seconds() -> None:
    events = log(*CYCLE * 20_000)
    start = time.perf_counter()
    read(events)
    per_event_us = (time.perf_counter() - start) / len(events) * 1e6
    assert per_event_us < 20
