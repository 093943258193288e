"""The batch of a failing step: saved, loaded and run again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradaudit
from gradaudit.capture.rerun import batches
from gradaudit.errors import GradauditError, RunCorrupt, RunNotFound, SchemaMismatch
from tests.unit.capture.trainings import WIDTH, batch, scaler

DEVICE = "cpu"


class Net(nn.Module):
    """Overflows in half where `gain` says so; has dropout and running statistics."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(WIDTH, 2)
        self.gain = gain

    def forward(self, x: torch.Tensor, *, factor: float = 1.0, extra: Any = None) -> torch.Tensor:
        y = self.first(self.drop(self.norm(x)))
        y = y * (self.gain * factor)
        return self.last(y)  # type: ignore[no-any-return]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def run(
    folder: Path,
    model: nn.Module,
    feed: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
    *,
    num_steps: int = 4,
    num_micro: int = 1,
    save_batch: bool = True,
    scale: float = 256.0,
    check: bool = False,
    weigh: Callable[[int], float] = lambda i: 1.0,
) -> list[torch.Tensor]:
    """FP16 training; returns the losses and the weights at its end."""
    optimizer, s = torch.optim.SGD(model.parameters(), lr=0.01), scaler(init_scale=scale)
    losses = []
    torch.manual_seed(1)
    with gradaudit.attach(model, optimizer, s, out=folder, save_batch=save_batch):
        for i in range(num_steps):
            optimizer.zero_grad()
            for k in range(num_micro):
                args, kwargs = feed(i * num_micro + k)
                with torch.autocast(DEVICE, dtype=torch.float16):
                    loss = loss_of(model(*args, **kwargs)) * weigh(i)
                if check and not loss.isfinite():
                    raise ValueError("loss is not finite")
                s.scale(loss).backward()
                losses.append(loss.detach())
            s.step(optimizer)
            s.update()
    return [*losses, *copy.deepcopy(list(model.state_dict().values()))]


def healthy(i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (batch(i),), {}


def large_at(*steps: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda i: ((batch(i),), {"factor": 2.0**20 if i in steps else 1.0})


def saved_of(folder: Path) -> list[dict[str, Any]]:
    saved: list[dict[str, Any]] = gradaudit.open_run(folder).meta["batches"]
    return saved


def test_a_healthy_run_saves_nothing(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), healthy)
    assert saved_of(tmp_path / "run") == []
    assert list((tmp_path / "run").glob("rank-*/*.pt")) == []
    with pytest.raises(RunNotFound, match=r"holds no saved batch; record again with --save-batch"):
        gradaudit.replay_batch(tmp_path / "run", Net())


def test_nothing_is_saved_unless_asked_for(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), large_at(2), save_batch=False)
    assert saved_of(tmp_path / "run") == []


def test_a_forward_that_overflows_is_saved_and_fails_again_in_fp16_only(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), large_at(2))
    assert saved_of(tmp_path / "run") == [{"step": 2, "file": "rank-00000/batch-000002.pt"}]
    model = Net()
    replay = gradaudit.replay_batch(tmp_path / "run", model, loss_of)
    assert (replay.step, replay.scale) == (2, 256.0)
    assert not replay.recorded.forward_finite
    assert replay.fp32.forward_finite
    assert replay.fp32.gradients_finite
    assert replay.first_bad is not None
    assert (replay.first_bad.op, replay.first_bad.module) == ("mul", "Net")
    assert Path(replay.first_bad.file or "").name == "test_batches.py"
    assert "self.gain * factor" in Path(__file__).read_text().splitlines()[(replay.first_bad.line or 0) - 1]
    assert replay.first_bad.amax_fp32 is not None
    assert replay.first_bad.amax_fp32 > 65504
    assert replay.verdict == (
        f"Only FP16 fails: the same batch is finite in FP32. First bad value: {replay.first_bad.sentence}."
    )
    assert replay.first_bad.sentence.startswith("a multiplication by a number in Net")
    assert replay.first_bad.sentence.endswith(" times the limit")
    assert replay.nonfinite_inputs == replay.nonfinite_weights == ()


def test_the_replay_repeats_the_recorded_loss_to_the_bit(tmp_path: Path) -> None:
    """Weights after several steps, dropout, running statistics, two micro-batches: all as they were."""
    feed = lambda i: ((batch(i) * (torch.nan if i == 7 else 1),), {"factor": 1.5})  # noqa: E731
    losses = run(tmp_path / "run", Net(), feed, num_micro=2)[:8]
    saved = torch.load(tmp_path / "run" / "rank-00000" / "batch-000003.pt", weights_only=True)
    assert len(saved["calls"]) == 2
    saved["calls"] = saved["calls"][:1]
    torch.save(saved, tmp_path / "first.pt")
    assert gradaudit.replay_batch(tmp_path / "first.pt", Net(), loss_of).recorded.loss == float(losses[6])


def test_a_backward_that_overflows_is_told_from_a_forward_that_does(tmp_path: Path) -> None:
    """The loss of the third step weighs a million times as much, in FP32."""
    run(tmp_path / "run", Net(), healthy, weigh=lambda i: 2.0**20 if i == 2 else 1.0)
    assert [entry["step"] for entry in saved_of(tmp_path / "run")] == [2]
    replay = gradaudit.replay_batch(tmp_path / "run", Net(), lambda output: loss_of(output) * 2.0**20)
    assert (replay.recorded.forward_finite, replay.recorded.gradients_finite) == (True, False)
    assert not replay.fp32.failed
    assert replay.verdict == (
        "Only the FP16 backward fails, at scale 2^8 and first in the gradient of last.weight; forward and FP32 are "
        "finite: a smaller scale is the cure."
    )
    # without the loss there is no backward
    assert "pass the loss function" in gradaudit.replay_batch(tmp_path / "run", Net()).verdict


def test_an_overflow_in_the_search_for_the_scale_is_no_fault(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), healthy, scale=2.0**30)
    assert gradaudit.open_run(tmp_path / "run").steps.skipped.any()
    assert saved_of(tmp_path / "run") == []


def test_a_batch_of_nan_acquits_fp16(tmp_path: Path) -> None:
    feed = lambda i: ((batch(i) * (torch.nan if i == 1 else 1),), {})  # noqa: E731
    run(tmp_path / "run", Net(), feed, num_steps=2)
    replay = gradaudit.replay_batch(tmp_path / "run", Net(), loss_of)
    assert replay.nonfinite_inputs == ("argument 1",)
    assert replay.first_bad is not None
    assert replay.first_bad.sentence == "the batch holds NaN itself"
    assert replay.verdict == (
        "FP16 is innocent: the same batch fails in FP32 too, since the batch itself holds NaN or Inf, in argument 1."
    )


def test_a_script_s_own_check_that_raises_still_leaves_the_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loss is not finite"):
        run(tmp_path / "run", Net(), large_at(1), check=True)
    assert [entry["step"] for entry in saved_of(tmp_path / "run")] == [1]
    replay = gradaudit.replay_batch(tmp_path / "run", Net())
    assert "Only FP16 fails" in replay.verdict


class Checking(Net):
    """Refuses to go on with what is not finite."""

    def forward(self, x: torch.Tensor, *, factor: float = 1.0, extra: Any = None) -> torch.Tensor:
        y = super().forward(x, factor=factor)
        if not y.isfinite().all():
            raise FloatingPointError("not finite")
        return y


def test_a_model_that_raises_in_mid_forward_is_replayed_up_to_there(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError):
        run(tmp_path / "run", Checking(), large_at(1))
    replay = gradaudit.replay_batch(tmp_path / "run", Checking(), loss_of)
    assert replay.recorded.raised == "FloatingPointError: not finite"
    assert replay.first_bad is not None
    assert replay.first_bad.op == "mul"
    assert replay.fp32.raised is None
    assert "Only FP16 fails" in replay.verdict


def test_an_exception_between_steps_saves_nothing(tmp_path: Path) -> None:
    def feed(i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if i == 2:
            raise KeyError("data")
        return healthy(i)

    with pytest.raises(KeyError):
        run(tmp_path / "run", Net(), feed)
    assert saved_of(tmp_path / "run") == []


def test_training_is_bit_identical_with_batches_kept(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", Net(), large_at(3), save_batch=False, num_steps=6)
    kept = run(tmp_path / "kept", Net(), large_at(3), num_steps=6)
    assert all(torch.equal(a, b) or (a.isnan().all() and b.isnan().all()) for a, b in zip(plain, kept, strict=True))


def test_the_model_and_the_random_numbers_are_as_before_after_a_replay(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), large_at(2))
    model = Net().eval()
    loss_of(model(batch())).backward()
    grads = [param.grad for param in model.parameters()]
    before = copy.deepcopy([*model.state_dict().values(), *grads]), torch.get_rng_state(), random.getstate()
    gradaudit.replay_batch(tmp_path / "run", model, loss_of)
    assert all(torch.equal(a, b) for a, b in zip(before[0][: -len(grads)], model.state_dict().values(), strict=True))
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before[0][-len(grads) :], grads, strict=True))
    assert torch.equal(before[1], torch.get_rng_state())
    assert before[2] == random.getstate()
    assert not any(module.training for module in model.modules())


def test_a_replay_while_recording_leaves_nothing_in_the_run(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), large_at(2))
    model = Net()
    with gradaudit.attach(model, out=tmp_path / "other"):
        gradaudit.replay_batch(tmp_path / "run", model, loss_of)
    other = gradaudit.open_run(tmp_path / "other")
    assert (len(other.steps), other.events(), other.ended) == (0, [], "ok")


def test_at_most_three_are_saved_and_the_one_asked_for_is_replayed(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), large_at(1, 2, 4, 5, 6), num_steps=8)
    assert [entry["step"] for entry in saved_of(tmp_path / "run")] == [1, 2, 4]
    assert gradaudit.replay_batch(tmp_path / "run", Net()).step == 1
    assert gradaudit.replay_batch(tmp_path / "run", Net(), step=4).step == 4
    with pytest.raises(RunNotFound, match=r"holds no batch of step 5; it holds those of 1, 2, 4"):
        gradaudit.replay_batch(tmp_path / "run", Net(), step=5)
    # a forced run takes the files of the one it replaces away
    run(tmp_path / "forced", Net(), large_at(1))
    with gradaudit.attach(Net(), out=tmp_path / "forced", force=True):
        pass
    assert list((tmp_path / "forced").glob("rank-*/*.pt")) == []


class Graph:
    """What a graph library passes to its models."""


def test_an_argument_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    feed = lambda i: ((batch(i),), {"factor": 2.0**20, "extra": [1, {"g": Graph()}]})  # noqa: E731
    run(tmp_path / "run", Net(), feed, num_steps=1)
    with pytest.raises(
        GradauditError, match=r"lacks argument extra\[1\]\['g'\] \(a Graph\), which is neither a tensor"
    ):
        gradaudit.replay_batch(tmp_path / "run", Net())


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), large_at(2))
    other = Net()
    other.last = nn.Linear(WIDTH, 3)
    with pytest.raises(
        GradauditError, match=r"does not fit .*batch-000002.pt: last.bias is not as in the Net that was saved"
    ):
        gradaudit.replay_batch(tmp_path / "run", other)


def test_what_is_no_saved_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="does not exist; pass a run folder or a saved batch"):
        gradaudit.replay_batch(tmp_path / "none", Net())
    (tmp_path / "text.pt").write_text("x")
    with pytest.raises(RunCorrupt, match=r"text.pt cannot be read"):
        gradaudit.replay_batch(tmp_path / "text.pt", Net())
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(RunCorrupt, match=r"other.pt is no saved batch"):
        gradaudit.replay_batch(tmp_path / "other.pt", Net())
    torch.save({"format": batches.BATCH_FORMAT, "version": 99}, tmp_path / "newer.pt")
    with pytest.raises(SchemaMismatch, match="written by a newer gradaudit"):
        gradaudit.replay_batch(tmp_path / "newer.pt", Net())


def test_a_batch_that_cannot_be_written_ends_the_saving_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    run(tmp_path / "run", Net(), large_at(1))
    found = gradaudit.open_run(tmp_path / "run")
    assert len(found.steps) == 4
    assert found.meta["errors"] == ["no batch is saved any more: OSError: [Errno 28] No space left on device"]


def test_a_half_model_is_widened_for_fp32_and_narrowed_again(tmp_path: Path) -> None:
    model = Net().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradaudit.attach(model, out=tmp_path / "run", save_batch=True):
        loss_of(model(batch().half(), factor=2.0**20)).backward()
        optimizer.step()
    fresh = Net().half()
    replay = gradaudit.replay_batch(tmp_path / "run", fresh, loss_of)
    assert "Only FP16 fails" in replay.verdict
    assert {tensor.dtype for tensor in fresh.parameters()} == {torch.float16}
    assert fresh.norm.running_mean is not None
    assert fresh.norm.running_mean.dtype is torch.float16


def test_a_model_with_autocast_inside_runs_in_fp32_for_comparison(tmp_path: Path) -> None:
    class Inside(Net):
        def forward(self, x: torch.Tensor, *, factor: float = 1.0, extra: Any = None) -> torch.Tensor:
            with torch.autocast(DEVICE, dtype=torch.float16):
                return super().forward(x, factor=factor)

    run(tmp_path / "run", Inside(), large_at(2))
    assert "Only FP16 fails" in gradaudit.replay_batch(tmp_path / "run", Inside(), loss_of).verdict


def test_a_batch_from_a_gpu_is_replayed_on_the_cpu_under_the_gpu_s_autocast(tmp_path: Path) -> None:
    run(tmp_path / "run", Net(), large_at(2))
    saved = torch.load(tmp_path / "run" / "rank-00000" / "batch-000002.pt", weights_only=True)
    saved["models"][0]["device"] = "cuda"
    for call in saved["calls"]:
        call["autocast"] = [
            {"device": "cpu", "enabled": False, "dtype": "bfloat16"},
            {"device": "cuda", "enabled": True, "dtype": "float16"},
        ]
    torch.save(saved, tmp_path / "gpu.pt")
    here, there = (gradaudit.replay_batch(tmp_path / name, Net(), loss_of) for name in ("run", "gpu.pt"))
    assert there.first_bad == here.first_bad
    assert there.verdict == here.verdict
    # without autocast nothing was in FP16, and nothing fails
    saved["calls"][0]["autocast"][1]["enabled"] = False
    torch.save(saved, tmp_path / "gpu.pt")
    assert not gradaudit.replay_batch(tmp_path / "gpu.pt", Net(), loss_of).recorded.failed


def test_a_loop_that_never_steps_keeps_a_bounded_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_CALLS", 3)
    audit = gradaudit.attach(model := Net(), out=tmp_path / "run", save_batch=True)
    for i in range(5):
        model(batch(i))
    audit.close(KeyError("data"))
    saved = torch.load(tmp_path / "run" / "rank-00000" / "batch-000000.pt", weights_only=True)
    assert (len(saved["calls"]), saved["num_calls"]) == (3, 5)
