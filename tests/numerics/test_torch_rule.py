"""The replayed rule against torch's own GradScaler, step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradaudit.analysis.replay import ScalerState, TorchPolicy, torch_update


def real_scales(policy: TorchPolicy, overflows: list[bool]) -> list[float]:
    """Scale after each update of a real GradScaler whose gradient is inf where asked."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=policy.init_scale,
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
        growth_interval=policy.growth_interval,
    )
    param = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler.scale(torch.zeros(()))
    scales = []
    for overflow in overflows:
        param.grad = torch.tensor(float("inf") if overflow else 0.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(float(scaler._scale))
    return scales


def replayed_scales(policy: TorchPolicy, overflows: list[bool]) -> list[float]:
    state = ScalerState(policy.init_scale)
    scales = []
    for overflow in overflows:
        state = torch_update(state, policy, found_inf=overflow)
        scales.append(state.scale)
    return scales


policies = st.builds(
    TorchPolicy,
    init_scale=st.sampled_from([1.0, 3.0, 256.0, 65536.0, 2.0**127, 2.0**-126, 2.0**-140]),
    growth_interval=st.integers(1, 5),
    growth_factor=st.sampled_from([2.0, 1.5, 1.01, 10.0]),
    backoff_factor=st.sampled_from([0.5, 0.7, 0.99, 0.001]),
)


@given(policy=policies, overflows=st.lists(st.booleans(), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_replay_equals_the_real_scaler_at_every_step(policy: TorchPolicy, overflows: list[bool]) -> None:
    assert replayed_scales(policy, overflows) == real_scales(policy, overflows)


def test_the_published_sequence_of_the_torch_rule() -> None:
    policy = TorchPolicy(init_scale=256.0, growth_interval=3)
    overflows = [letter == "X" for letter in "CCCCXCCCCXXXCCCCCCCX"]

    scales = replayed_scales(policy, overflows)

    expected = "256 256 512 512 256 256 256 512 512 256 128 64 64 64 128 128 128 256 256 128"
    assert scales == [float(scale) for scale in expected.split()]


def test_growth_to_infinity_is_refused_and_the_tracker_starts_again() -> None:
    policy = TorchPolicy(init_scale=2.0**127, growth_interval=2)

    state = ScalerState(policy.init_scale)
    trackers = []
    for _ in range(4):
        state = torch_update(state, policy, found_inf=False)
        trackers.append(state.growth_tracker)

    assert state.scale == 2.0**127
    assert trackers == [1, 0, 1, 0]


def test_a_scale_that_has_fallen_to_zero_stays_there() -> None:
    policy = TorchPolicy(init_scale=2.0**-147, growth_interval=1)

    scales = replayed_scales(policy, [True, True, True, False, False])

    assert scales == [2.0**-148, 2.0**-149, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        ({"init_scale": 0.0}, "init_scale is 0.0; it must be above 0"),
        ({"init_scale": float("inf")}, "init_scale is inf"),
        ({"growth_interval": 0}, "growth_interval is 0; it must be 1 or more"),
        ({"growth_factor": 1.0}, "growth_factor is 1.0; it must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor is 1.0; it must be above 0 and below 1"),
        ({"backoff_factor": -0.5}, "backoff_factor is -0.5"),
    ],
)
def test_settings_under_which_it_would_not_work_are_refused(settings_: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TorchPolicy(**settings_)  # type: ignore[arg-type]
