"""Precision set-up, judged on records written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.calls import read_calls
from gradaudit.analysis.checks.base import Facts, Skipped
from gradaudit.analysis.checks.precision.set_up import PRECISION
from gradaudit.analysis.context import analyse
from gradaudit.analysis.report import Finding
from gradaudit.analysis.windows import windows
from gradaudit.store import open_run
from gradaudit.store.writer import RunWriter
from tests import factory
from tests.unit.analysis.logs import BACKWARD, DIRECT, STEP, UNSCALE, ZERO, Call, changed, clip, log

LOOKS = {check.id: check.look for check in PRECISION}

PARAM, OUTPUT, UPDATE = 0, 1, 2


def table(**output: Any) -> list[dict[str, Any]]:
    return [
        factory.tensor(PARAM, "fc.weight", "param_grad", dtype="float32", module=""),
        factory.tensor(OUTPUT, "fc", "output", **output),
        factory.tensor(UPDATE, "fc.weight", "update", module=""),
    ]


def optimizer(**more: Any) -> dict[str, Any]:
    return {
        "id": 0, "class": "Adam", "params": [PARAM], "resumed": False, "lr": 1e-3, "param_dtypes": ["float16"],
        "param_devices": ["cpu"], "eps": 1e-8, "state_dtypes": {}, "keeps_masters": False, "file": "train.py",
        "line": 7, **more,
    }  # fmt: skip


def steps(count: int = 8, **more: Any) -> list[dict[str, Any]]:
    return [factory.step(i, **{"param_amax": [1.0], **more}) for i in range(count)]


def look(
    path: Path,
    name: str,
    *,
    rows: Sequence[dict[str, Any]] | None = None,
    samples: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
    tensors: list[dict[str, Any]] | None = None,
    **meta: Any,
) -> Sequence[Finding] | Skipped:
    run_meta = factory.meta(table() if tensors is None else tensors, **{"optimizers": [optimizer()], **meta})
    rows = steps() if rows is None else list(rows)
    written = factory.write_run(
        path / "run", run_meta=run_meta, steps=list(rows), samples=list(samples), events=list(events)
    )
    analysis = analyse(open_run(written))
    stored = tuple(analysis.run.events())
    return LOOKS[name](Facts(analysis, windows(analysis), (), stored, (), lambda: read_calls(stored)))


def found(path: Path, name: str, **run: Any) -> Finding:
    outcome = look(path, name, **run)
    assert not isinstance(outcome, Skipped)
    (finding,) = outcome
    return finding


def reason(path: Path, name: str, **run: Any) -> str:
    outcome = look(path, name, **run)
    assert isinstance(outcome, Skipped)
    return outcome.reason


def numbers(finding: Finding) -> dict[str, Any]:
    return {item.name: item.value for item in finding.evidence}


def test_half_parameters_count_only_where_they_are_trained(tmp_path: Path) -> None:
    name = "half-trainable-params"
    assert found(tmp_path / "trained", name).severity == "error"
    assert found(tmp_path / "no steps yet", name, rows=[]).steps == (0, 0)
    assert look(tmp_path / "no gradient ever", name, rows=steps(param_amax=[None])) == []
    frozen = [{**row, "trainable": False} for row in table()]
    assert look(tmp_path / "frozen", name, tensors=frozen) == []
    assert look(tmp_path / "bf16", name, optimizers=[optimizer(param_dtypes=["bfloat16"])]) == []
    assert look(tmp_path / "masters", name, optimizers=[optimizer(keeps_masters=True)]) == []
    assert reason(tmp_path / "none", name, optimizers=[]) == "no optimizer was used"


def test_masters_do_not_help_against_what_torch_refuses(tmp_path: Path) -> None:
    refused = log([(*STEP[:1], {"raised": "ValueError: Attempting to unscale FP16 gradients"})])
    finding = found(
        tmp_path, "half-trainable-params", events=refused, optimizers=[optimizer(keeps_masters=True)], rows=[]
    )
    assert [(place.type, place.name, place.line) for place in finding.where] == [
        ("param", "fc.weight", None),
        ("call_site", "scaler.step", 0),
        ("optimizer", "Adam", 7),
    ]


def updates(lost: int, of: int = 1000, num: int = 3) -> list[dict[str, Any]]:
    rows = []
    for step in range(num):
        row = factory.sample(step, UPDATE, {-10: of - lost}, num_zero=lost, scaled=False)
        rows.append({**row, "counts": None})
    return rows


@pytest.mark.parametrize(("lost", "severity"), [(150, None), (300, "warning"), (700, "error")])
def test_the_share_of_lost_updates_decides(tmp_path: Path, lost: int, severity: str | None) -> None:
    outcome = look(tmp_path, "swallowed-updates", samples=updates(lost))
    assert not isinstance(outcome, Skipped)
    assert [finding.severity for finding in outcome] == ([] if severity is None else [severity])
    for finding in outcome:
        assert numbers(finding)["swallowed_share"] == lost / 1000
        assert "at learning rate 0.001" in finding.summary


def test_steps_that_were_skipped_or_broken_say_nothing_of_updates(tmp_path: Path) -> None:
    bad: dict[str, dict[str, Any]] = {
        "skipped": {"skipped": True, "found_inf": True},
        "non-finite": {"nonfinite": [PARAM]},
        "no loss": {"loss_finite": False},
    }
    for name, more in bad.items():
        said = reason(tmp_path / name, "swallowed-updates", samples=updates(900), rows=steps(**more))
        assert said == "no applied step with finite gradients was sampled"
    assert "not FP32" in reason(tmp_path / "none", "swallowed-updates", tensors=table()[:2])


@pytest.mark.parametrize(
    ("more", "fires"),
    [
        ({"state_dtypes": {"exp_avg": "float16"}}, True),
        ({"state_dtypes": {"exp_avg": "float16"}, "eps": 0.0}, True),
        ({"state_dtypes": {"exp_avg": "float16"}, "eps": 1e-4}, False),
        ({"state_dtypes": {"exp_avg": "float32"}}, False),
        ({"state_dtypes": {"momentum_buffer": "float16"}, "eps": None}, False),
    ],
)
def test_eps_against_the_dtype_of_the_state(tmp_path: Path, more: dict[str, Any], fires: bool) -> None:
    outcome = look(tmp_path, "optimizer-eps-flushed", optimizers=[optimizer(**more)])
    assert not isinstance(outcome, Skipped)
    assert bool(outcome) == fires


INF = clip(1.0, "inf", nonfinite_before=None, nonfinite_after=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("calls", "fires"),
    [
        ((ZERO, BACKWARD, INF, DIRECT), True),
        ((ZERO, BACKWARD, UNSCALE, INF, STEP), True),
        # the script looked at the norm and gave the step up; the next one is fine
        ((ZERO, BACKWARD, INF, ZERO, BACKWARD, clip(1.0, 3.0), DIRECT), False),
        ((ZERO, BACKWARD, INF, BACKWARD, clip(1.0, 3.0), DIRECT), False),
        # another optimizer's calls change nothing
        ((ZERO, BACKWARD, INF, ("optimizer.zero_grad", {"optimizer": 1}), DIRECT), True),
        ((ZERO, BACKWARD, clip(1.0, "nan"), DIRECT), False),  # type: ignore[arg-type]
        ((ZERO, BACKWARD, clip(1.0, 70000.0), DIRECT), False),
    ],
)
def test_an_infinite_norm_counts_where_its_gradients_were_used(
    tmp_path: Path, calls: Sequence[Call], fires: bool
) -> None:
    outcome = look(tmp_path, "gradient-norm-overflow", events=log(calls), rows=steps(2, param_amax=[0.0]))
    assert not isinstance(outcome, Skipped)
    assert bool(outcome) == fires


@pytest.mark.parametrize("before", [None, True])
def test_a_norm_is_infinite_where_a_gradient_is(tmp_path: Path, before: bool | None) -> None:
    events = log((ZERO, BACKWARD, clip(1.0, "inf", nonfinite_before=before), DIRECT))  # type: ignore[arg-type]
    rows = steps(2, param_amax=[float("nan")], nonfinite=[PARAM])
    assert look(tmp_path, "gradient-norm-overflow", events=events, rows=rows) == []


def by_hand(*norms_and_factors: tuple[float, float]) -> list[dict[str, Any]]:
    return log(
        *[
            (ZERO, BACKWARD, changed(norm_before=norm, factor_min=factor, factor_max=factor), DIRECT)
            for norm, factor in norms_and_factors
        ]
    )


@pytest.mark.parametrize(
    ("changes", "fires"),
    [
        (((400.0, 0.0), (90.0, 0.1), (95.0, 0.1)), True),  # it clips the smaller ones
        (((400.0, 0.0), (900.0, 0.1)), False),  # a larger one passed
        (((100.0, 0.0),) * 8, False),  # no norm in half overflows at that
        (((400.0, 0.0),) * 8, True),  # nothing ever arrives
        (((400.0, 0.0),), False),  # one batch dropped on purpose
    ],
)
def test_gradients_zeroed_by_hand(tmp_path: Path, changes: Sequence[tuple[float, float]], fires: bool) -> None:
    outcome = look(
        tmp_path, "gradient-norm-overflow", events=by_hand(*changes), optimizers=[optimizer(param_dtypes=["float32"])]
    )
    assert not isinstance(outcome, Skipped)
    assert bool(outcome) == fires


BF16 = {"device": "cpu", "dtype": "bfloat16", "enabled": True}
FP32_PARAMS = [optimizer(param_dtypes=["float32"])]


def without_fp16(**more: Any) -> dict[str, Any]:
    tensors = [{**row, "dtype": "bfloat16"} for row in table()[:2]]
    return {"tensors": tensors, "autocast": [BF16], "optimizers": FP32_PARAMS, **more}


def test_a_scaler_is_judged_by_what_was_seen(tmp_path: Path) -> None:
    name = "scaler-without-fp16"
    assert "bfloat16" in found(tmp_path / "bf16", name, **without_fp16()).title
    assert look(tmp_path / "output", name, **without_fp16(tensors=table())) == []
    mixed = [BF16, {**BF16, "dtype": "float16"}]
    assert look(tmp_path / "region", name, **without_fp16(autocast=mixed)) == []
    assert look(tmp_path / "param", name, **without_fp16(optimizers=[optimizer()])) == []
    off = [factory.scaler(enabled=False)]
    assert "no enabled" in reason(tmp_path / "off", name, **without_fp16(scalers=off))
    unseen = without_fp16(tensors=without_fp16()["tensors"][:1], autocast=[])
    assert "no tensor" in reason(tmp_path / "unseen", name, **unseen)
    hidden = [{"name": "net", "kind": "compiled"}]
    assert "compiled" in reason(tmp_path / "hidden", name, **without_fp16(autocast=[], hidden_modules=hidden))


CUDA = {"device": "cuda", "dtype": "float16", "enabled": True, "file": "train.py", "line": 3}


@pytest.mark.parametrize(
    ("autocast", "fires"),
    [
        ([CUDA], True),
        ([{**CUDA, "enabled": False, "requested": True}], True),
        ([{**CUDA, "enabled": False}], False),
        ([CUDA, {**BF16, "dtype": "float16"}], False),
        ([{**CUDA, "dtype": "float32"}], False),
    ],
    ids=["elsewhere", "refused", "off on purpose", "beside the right one", "FP32 is meant"],
)
def test_autocast_for_a_device_that_the_model_is_not_on(
    tmp_path: Path, autocast: list[dict[str, Any]], fires: bool
) -> None:
    outcome = look(tmp_path, "autocast-inactive", autocast=autocast)
    assert not isinstance(outcome, Skipped)
    assert bool(outcome) == fires


def test_the_right_device_is_that_of_the_parameters(tmp_path: Path) -> None:
    on_gpu = [optimizer(param_devices=["cuda"])]
    assert look(tmp_path / "both", "autocast-inactive", autocast=[CUDA, BF16], optimizers=on_gpu) == []
    finding = found(tmp_path / "wrong", "autocast-inactive", autocast=[BF16], optimizers=on_gpu)
    assert numbers(finding)["model_device"] == "cuda"


@pytest.mark.parametrize(
    ("scaler", "autocast", "used", "fires"),
    [
        ({"requested": True}, [{**BF16, "dtype": "float16"}], True, True),
        ({"requested": True}, [BF16], True, False),
        ({"requested": True}, [{**BF16, "dtype": "float16"}], False, False),
        ({"requested": False}, [{**BF16, "dtype": "float16"}], True, False),
        ({"requested": None}, [{**BF16, "dtype": "float16"}], True, False),
    ],
    ids=["turned off by torch", "bfloat16 needs none", "never used", "off on purpose", "not seen"],
)
def test_a_scaler_that_torch_turned_off(
    tmp_path: Path, scaler: dict[str, Any], autocast: list[dict[str, Any]], used: bool, fires: bool
) -> None:
    scalers = [{**factory.scaler(enabled=False), "device": "cuda", "file": "train.py", "line": 5, **scaler}]
    events = log([("scaler.scale", {})]) if used else []
    outcome = look(tmp_path, "autocast-inactive", scalers=scalers, autocast=autocast, events=events)
    assert not isinstance(outcome, Skipped)
    assert [place.line for finding in outcome for place in finding.where] == ([5] if fires else [])


def ranks(path: Path, other: list[dict[str, Any]], **meta: Any) -> Sequence[Finding] | Skipped:
    writer = RunWriter(path / "run", rank=1, meta=factory.meta(table(), rank=1, world_size=2))
    writer.append("steps", other)
    writer.flush()
    return look(path, "rank-disagreement", **meta)


def test_ranks_are_compared_step_by_step(tmp_path: Path) -> None:
    joined = {"distributed": {"backend": "gloo"}, "world_size": 2}
    same, scale = steps(8), [*steps(5), *(factory.step(i, scale=32768.0) for i in range(5, 8))]
    skips = [factory.step(i, skipped=i == 3) for i in range(6)]
    assert ranks(tmp_path / "same", same, **joined) == []
    outcome = ranks(tmp_path / "scale", scale, **joined)
    assert not isinstance(outcome, Skipped)
    assert outcome[0].steps == (5, 7)
    assert numbers(outcome[0]) == {"scale_rank_0": 65536.0, "scale_rank_1": 32768.0, "num_steps": 3}
    outcome = ranks(tmp_path / "skip", skips, **joined)
    assert not isinstance(outcome, Skipped)
    assert outcome[0].steps == (3, 3)
    assert isinstance(ranks(tmp_path / "apart", scale, distributed=None), Skipped)
    assert reason(tmp_path / "alone", "rank-disagreement", **joined) == "one process"


def test_a_compiled_root_has_no_name_of_its_own(tmp_path: Path) -> None:
    hidden = [{"name": "_orig_mod", "kind": "compiled"}, {"name": "head._orig_mod", "kind": "compiled"}]
    finding = found(tmp_path, "compiled-blind-spot", hidden_modules=hidden)
    assert [place.name for place in finding.where] == ["the model", "head"]
    assert finding.severity == "info"
