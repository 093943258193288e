"""`gradaudit run` as users call it: a process of its own around an ordinary script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from gradaudit import replay_batch
from gradaudit.store import Run, open_run

TRAIN = """
import sys
from torch.amp import GradScaler, autocast
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu", init_scale=2.0**24)
x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
for step in range(12):
    with autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def gradaudit_run(
    folder: Path, *arguments: str, script: str | None = None, environment: dict[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    if script is not None:
        (folder / "train.py").write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-m", "gradaudit", "run", *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
        check=False,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Run]:
    folder = tmp_path_factory.mktemp("recorded")
    done = gradaudit_run(folder, "--every", "3", "--out", "run", "train.py", script=TRAIN + "\nprint('trained')\n")
    return done, open_run(folder / "run")


def test_names_imported_before_anything_else_are_recorded(
    recorded: tuple[subprocess.CompletedProcess[str], Run],
) -> None:
    done, run = recorded

    assert done.returncode == 0
    assert run.ended == "ok"
    assert run.meta["errors"] == []
    assert len(run.steps) == 12
    assert run.meta["scalers"][0]["init_scale"] == 2.0**24
    assert run.meta["autocast"][0]["dtype"] == "float16"
    assert run.meta["argv"] == ["train.py"]


def test_skipped_steps_name_the_parameters_with_non_finite_gradients(
    recorded: tuple[subprocess.CompletedProcess[str], Run],
) -> None:
    _, run = recorded
    steps, tensors = run.steps, run.tensors()

    skipped = np.flatnonzero(steps.skipped)

    assert len(skipped) > 0
    assert all(len(steps.nonfinite[i]) for i in skipped)
    assert {tensors[t].fqn for i in skipped for t in steps.nonfinite[i]} <= {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not any(len(steps.nonfinite[i]) for i in np.flatnonzero(~steps.skipped.astype(bool)))


def test_the_scripts_output_passes_and_the_diagnosis_goes_to_stderr(
    recorded: tuple[subprocess.CompletedProcess[str], Run],
) -> None:
    done, _ = recorded

    assert done.stdout == "trained\n"
    assert done.stderr.lstrip().startswith("HEALTHY")
    assert "gradaudit dashboard run" in done.stderr


def test_the_batch_that_fails_is_kept_if_asked_for_and_replayed_elsewhere(tmp_path: Path) -> None:
    script = TRAIN.replace("2.0**24", "2.0**8").replace("model(x)", "model(x * (1e6 if step == 5 else 1))")
    done = gradaudit_run(tmp_path, "--out", "run", "--save-batch", "--quiet", "train.py", script=script)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.meta["settings"]["save_batch"]
    assert run.meta["batches"] == [{"step": 5, "file": "rank-00000/batch-000005.pt"}]
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    replay = replay_batch(tmp_path / "run", model)
    assert replay.first_bad is not None
    assert (replay.first_bad.op, replay.first_bad.module) == ("to_copy", "0")
    assert replay.verdict.startswith("Only FP16 fails")


def test_every_forward_is_traced_if_asked_for(tmp_path: Path) -> None:
    done = gradaudit_run(tmp_path, "--out", "run", "--origin", "always", "--quiet", "train.py", script=TRAIN)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.meta["settings"]["origin"] == "always"
    assert run.steps.traced.all()
    assert {op.step for op in run.ops()} == set(run.steps.step.tolist())
    assert {op.file for op in run.ops() if op.op != "input"} == {"train.py"}


def test_attaching_by_hand_gives_the_same_run(
    recorded: tuple[subprocess.CompletedProcess[str], Run], tmp_path: Path
) -> None:
    _, by_command = recorded
    head, loop = TRAIN.split("for step in range(12):\n")
    by_hand = f"{head}import gradaudit\naudit = gradaudit.attach(model, optimizer, scaler, out='run', every=3)\n"
    (tmp_path / "train.py").write_text(f"{by_hand}for step in range(12):\n{loop}audit.close()\n")

    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, timeout=120)

    other = open_run(tmp_path / "run")
    one, two = by_command.samples(), other.samples()
    names = [(t.kind, t.fqn, t.op, t.dtype) for t in by_command.tensors()]
    assert names == [(t.kind, t.fqn, t.op, t.dtype) for t in other.tensors()]
    assert np.array_equal(one.counts, two.counts)
    assert np.array_equal(one.step, two.step)
    assert np.array_equal(by_command.steps.scale, other.steps.scale)
    assert np.array_equal(by_command.steps.loss, other.steps.loss)
    made = ("optimizer", "GradScaler")  # before attach could see it
    seen = [e["name"] for e in by_command.events() if e["name"] not in made]
    assert seen == [e["name"] for e in other.events()]


def test_arguments_and_stdin_reach_the_script(tmp_path: Path) -> None:
    script = "import sys\nprint(sys.argv, sys.path[0] == sys.argv[1], __name__, __file__, sys.stdin.read())\n"

    done = gradaudit_run(tmp_path, "train.py", str(tmp_path), "--lr", "3", "-q", script=script, stdin="fed")

    assert done.stdout == f"['train.py', '{tmp_path}', '--lr', '3', '-q'] True __main__ train.py fed\n"
    assert "did not use torch" in done.stderr
    assert not any((tmp_path / "gradaudit-runs").iterdir())


def test_what_the_script_sets_before_importing_torch_still_counts(tmp_path: Path) -> None:
    script = """
        import os, sys
        assert "torch" not in sys.modules
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        print(torch.get_num_threads())
    """

    done = gradaudit_run(tmp_path, "--quiet", "train.py", script=script, environment={"OMP_NUM_THREADS": "2"})

    assert done.stdout == "1\n"


def test_a_module_runs_with_dash_m(tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "from . import __name__ as parent\n" + TRAIN + "print(parent, __name__, sys.argv[1:])\n"
    )

    done = gradaudit_run(tmp_path, "--out", "run", "--quiet", "-m", "project.train", "--fast")

    assert (done.returncode, done.stdout, done.stderr) == (0, "project __main__ ['--fast']\n", "")
    assert len(open_run(tmp_path / "run").steps) == 12


def test_a_script_that_raises_keeps_its_traceback_status_and_run(tmp_path: Path) -> None:
    script = TRAIN + "def fail():\n    raise KeyError('batch')\n\nfail()\n"

    done = gradaudit_run(tmp_path, "--out", "run", "train.py", script=script)
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    # the interpreter names the script by the path it was given
    assert done.stderr.startswith(plain.stderr.replace(f'"{tmp_path}/train.py"', '"train.py"'))
    run = open_run(tmp_path / "run")
    assert run.ended == "exception"
    assert run.meta["exception"]["type"] == "KeyError"
    assert run.meta["exception"]["file"] == "train.py"
    assert len(run.steps) == 12


def test_an_error_inside_backward_shows_no_frame_of_gradaudit(tmp_path: Path) -> None:
    script = """
        import torch

        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                raise RuntimeError("no gradient today")

        Broken.apply(torch.ones(1, requires_grad=True)).backward()
    """

    done = gradaudit_run(tmp_path, "--quiet", "train.py", script=script)

    assert done.returncode == 1
    assert "no gradient today" in done.stderr
    assert f"gradaudit{os.sep}" not in done.stderr


@pytest.mark.parametrize(("call", "status"), [("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('no data')", 1)])
def test_the_exit_status_is_the_scripts_own(tmp_path: Path, call: str, status: int) -> None:
    done = gradaudit_run(tmp_path, "--out", "run", "--quiet", "train.py", script=f"import sys, torch\n{call}\n")

    assert done.returncode == status
    assert done.stderr == ("no data\n" if status == 1 else "")
    assert open_run(tmp_path / "run").ended == ("ok" if status == 0 else "exception")


def test_ctrl_c_ends_as_a_signal_with_the_run_complete(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "gradaudit", "run", "--out", "run", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    run = open_run(tmp_path / "run")
    assert (run.ended, run.meta["exception"]["type"], len(run.steps)) == ("exception", "KeyboardInterrupt", 12)


def test_a_killed_script_leaves_a_readable_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "import time\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, "-m", "gradaudit", "run", "--out", "run", "train.py"], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "run").glob("rank-00000/steps-*.parquet")):
        time.sleep(0.1)

    assert open_run(tmp_path / "run").ended == "running"
    process.kill()
    process.wait()

    run = open_run(tmp_path / "run")
    assert run.ended == "killed"
    assert len(run.steps) == 12


def test_recommended_settings_are_applied_to_the_scripts_own_scaler(tmp_path: Path) -> None:
    script = TRAIN.replace("2.0**24", "2.0**-30") + "print(scaler.get_growth_interval(), scaler.get_scale())\n"
    gradaudit_run(tmp_path, "--out", "before", "--every", "1", "train.py", script=script)

    done = gradaudit_run(tmp_path, "--out", "after", "--apply", "before", "train.py")

    before, after = open_run(tmp_path / "before"), open_run(tmp_path / "after")
    assert before.meta["applied"] is None
    assert after.meta["applied"]["init_scale"] == after.meta["scalers"][0]["init_scale"] > 1
    assert done.stdout.split()[0] == str(after.meta["applied"]["growth_interval"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.py"], "nowhere.py does not exist; pass the path of a training script."),
        ([], "Missing SCRIPT: pass the training script to run."),
        (["--every", "0", "train.py"], "--every"),
        (["--out", "train.py/run", "train.py"], "Cannot write the run to train.py/run"),
        (["--apply", "nowhere", "train.py"], "nowhere does not exist"),
        (["--apply", "train.py", "train.py"], "train.py is no JSON report"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2_before_anything_runs(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = gradaudit_run(tmp_path, *arguments, script="print('ran')\n")

    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_existing_run_is_kept_unless_forced(tmp_path: Path) -> None:
    first = gradaudit_run(tmp_path, "--out", "run", "--quiet", "train.py", script=TRAIN)
    before = (tmp_path / "run" / "run.json").read_bytes()

    refused = gradaudit_run(tmp_path, "--out", "run", "train.py")
    kept = (tmp_path / "run" / "run.json").read_bytes()
    forced = gradaudit_run(tmp_path, "--out", "run", "--force", "--quiet", "train.py")

    assert (first.returncode, refused.returncode, forced.returncode) == (0, 2, 0)
    assert "already holds a run" in refused.stderr
    assert kept == before
    assert (tmp_path / "run" / "run.json").read_bytes() != before


def test_two_ranks_share_a_folder_and_no_file(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        environment = {"RANK": rank, "WORLD_SIZE": "2"}
        done = gradaudit_run(tmp_path, "--out", "run", "--quiet", "train.py", script=TRAIN, environment=environment)
        assert (done.returncode, done.stderr) == (0, "")

    run = open_run(tmp_path / "run")

    assert run.ranks == (0, 1)
    assert run.meta["world_size"] == 2
    assert len(run.rank_steps(1)) == 12
    assert run.tensors(1) == run.tensors(0)


def test_several_ranks_have_to_be_told_where_to_write(tmp_path: Path) -> None:
    done = gradaudit_run(tmp_path, "train.py", script=TRAIN, environment={"RANK": "1", "WORLD_SIZE": "2"})

    assert done.returncode == 2
    assert "pass --out DIR" in done.stderr
