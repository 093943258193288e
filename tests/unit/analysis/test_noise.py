from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradaudit.analysis.noise import Noise, addend_margin_db, energy, own_noise, rounds_in_fp16, total_noise
from gradaudit.store.reader import Run
from tests import factory
from tests.unit.analysis.runs import HIDDEN, LOSS, run_of, samples, steps, tensors

HERE = np.zeros(1)


def decibels(run: Run, shift_log2: np.ndarray = HERE) -> tuple[np.ndarray, np.ndarray]:
    """Own and total SQNR of all samples, shape [R, K] each."""
    own = own_noise(run.samples(), run.tensors(), shift_log2)
    return own.sqnr_db(), total_noise(run.samples(), run.tensors(), own).sqnr_db()


def one_tensor(path: Path, exponents: dict[int, int], **more: Any) -> Run:
    return run_of(path, steps(1), [factory.sample(0, 0, exponents, **more)], table=[factory.tensor(0, "x")])


def spread(exponent: int) -> dict[int, int]:
    """Values over four binades, so that no magnitude stands out."""
    return {exponent: 100, exponent - 1: 100, exponent - 2: 100, exponent - 3: 100}


def test_normal_values_have_the_noise_of_eleven_bits_at_every_scale(tmp_path: Path) -> None:
    own, _ = decibels(one_tensor(tmp_path, spread(0)), np.array([-8, 0, 8]))

    expected = 10 * math.log10(1.5**2 * 12 * 2.0**20)
    assert own[0] == pytest.approx([expected] * 3)


def test_flushed_values_are_all_noise(tmp_path: Path) -> None:
    own, _ = decibels(one_tensor(tmp_path, spread(-30)))

    assert own[0, 0] == pytest.approx(0.0)


def test_half_of_the_energy_flushed_is_three_decibels(tmp_path: Path) -> None:
    """At 2^-16 the values of 2^-10 flush and those of 2^0 stay normal; their energies are equal."""
    own, _ = decibels(one_tensor(tmp_path, {0: 1, -10: 4**10}), np.array([-16.0]))

    assert own[0, 0] == pytest.approx(10 * math.log10(2), abs=0.01)


def test_values_that_share_one_magnitude_round_alike(tmp_path: Path) -> None:
    """The gradient of logits: 1.96 steps of the format are nearly two, whatever the mean over positions would be."""
    shared = one_tensor(tmp_path / "a", {0: 100}, amax=1.96)
    spread_out = one_tensor(tmp_path / "b", {0: 100, -1: 100, -2: 100}, amax=1.96)
    at = np.array([-24.0])

    assert decibels(shared, at)[0][0, 0] == pytest.approx(10 * math.log10(1.96**2 / 0.04**2))
    assert decibels(spread_out, at)[0][0, 0] < 20
    assert energy(shared.samples())[0] == pytest.approx(100 * 1.96**2)


def test_no_signal_has_no_ratio_and_no_rounding_no_noise(tmp_path: Path) -> None:
    rows = [*samples(0, {}, num_zero=50), factory.sample(1, HIDDEN, {}, num_nan=50)]
    own, total = decibels(run_of(tmp_path, steps(2), rows))
    sampled = run_of(tmp_path / "again", steps(2), rows).samples()

    assert np.isnan(own[sampled.tensor == HIDDEN]).all()
    assert np.isnan(total[sampled.tensor == HIDDEN]).all()
    assert np.isposinf(own[sampled.tensor == LOSS]).all()


def test_noise_is_inherited_along_the_graph_by_the_energy_each_path_brings(tmp_path: Path) -> None:
    """A noisy parent with a tenth of the energy of a clean one passes on a tenth of its ratio."""
    table = [
        factory.tensor(0, "noisy", dtype="float16"),
        factory.tensor(1, "clean", dtype="float32"),
        factory.tensor(2, "sum", dtype="float32", parents=[0, 1]),
        factory.tensor(3, "unrelated", dtype="float32"),
    ]
    rows = [
        factory.sample(0, 0, {-20: 90, -21: 90}),
        factory.sample(0, 1, {-20: 810, -21: 810}),
        factory.sample(0, 2, {-20: 900, -21: 900}),
        factory.sample(0, 3, {-20: 900, -21: 900}),
    ]
    own, total = decibels(run_of(tmp_path, steps(1), rows, table=table))

    assert np.isposinf(own[2, 0])
    assert total[2, 0] == pytest.approx(own[0, 0] + 10, abs=0.01)
    assert np.isposinf(total[3, 0])


def test_a_cycle_in_the_graph_is_cut(tmp_path: Path) -> None:
    """Names that moved between steps can close one."""
    table = [factory.tensor(0, "a", parents=[1]), factory.tensor(1, "b", parents=[0])]
    rows = [factory.sample(0, 0, spread(0)), factory.sample(0, 1, spread(0))]

    _, total = decibels(run_of(tmp_path, steps(1), rows, table=table))
    assert np.isfinite(total).all()


def test_a_parent_that_was_not_recorded_passes_nothing_on(tmp_path: Path) -> None:
    table = [factory.tensor(0, "a", parents=[7]), factory.tensor(1, "b", parents=[0])]

    own, total = decibels(run_of(tmp_path, steps(1), [factory.sample(0, 1, spread(0))], table=table))
    assert total.tolist() == own.tolist()


def test_an_exact_copy_rounds_only_where_it_is_cast(tmp_path: Path) -> None:
    table = [
        factory.tensor(0, "wide", dtype="float32"),
        factory.tensor(1, "cast", parents=[0], exact=True),
        factory.tensor(2, "copied", parents=[1], exact=True),
        factory.tensor(3, "computed", parents=[2]),
    ]

    assert rounds_in_fp16(run_of(tmp_path, [], table=table).tensors()).tolist() == [False, True, False, True]


def test_what_is_added_to_something_larger_may_be_noisier_by_as_much(tmp_path: Path) -> None:
    table = [
        factory.tensor(0, "trunk", "op_grad", op="Addmm -> Relu"),
        factory.tensor(1, "trunk", "op_grad", op="Mm -> Relu"),
        factory.tensor(2, "trunk", "op_grad", op="Relu", parents=[0, 1]),
    ]
    rows = [factory.sample(0, 0, spread(0)), factory.sample(0, 1, spread(-10)), factory.sample(0, 2, spread(0))]
    run = run_of(tmp_path, steps(1), rows, table=table)

    margin = addend_margin_db(run.samples(), run.tensors())
    assert margin == pytest.approx([0.0, 20 * math.log10(2.0**10), 0.0], abs=0.01)


def test_a_sum_over_the_batch_averages_noise_but_not_what_is_missing() -> None:
    assert Noise(np.array([[0.01]]), np.array([[0.0]])).sqnr_db() == pytest.approx(np.array([[20.0]]))
    assert Noise(np.array([[0.0]]), np.array([[0.0]])).sqnr_db().tolist() == [[math.inf]]


def weight_run(path: Path, exponent: int, noise_gain: float | None) -> Run:
    table = [*tensors(), factory.tensor(3, "hidden.weight", "op_grad", op="ToCopy", parents=[HIDDEN])]
    table[2]["parents"] = [3]
    rows = samples(0, spread(exponent))
    rows[2] = factory.sample(0, 2, spread(exponent), noise_gain=noise_gain)
    return run_of(path, steps(1), [*rows, factory.sample(0, 3, spread(exponent))], table=table)


def test_a_weight_whose_contributions_agree_is_cleaner_than_what_it_comes_from(tmp_path: Path) -> None:
    """The recorded gain says what independent errors bring: a hundredth is credited with 10 dB at most."""
    run = weight_run(tmp_path, -22, 0.01)
    own, total = decibels(run)

    inherited = 10 ** (-total[3, 0] / 10) - 10 ** (-own[3, 0] / 10)
    assert -10 * math.log10(inherited) == pytest.approx(own[HIDDEN, 0] + 10, abs=0.5)


def test_a_weight_whose_contributions_cancel_is_noisier(tmp_path: Path) -> None:
    _, plain = decibels(weight_run(tmp_path / "a", -22, None))
    _, cancelled = decibels(weight_run(tmp_path / "b", -22, 50.0))

    assert cancelled[3, 0] < plain[3, 0] - 10
