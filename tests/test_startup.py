"""The command answers at once, and what needs no torch does not wait for it.

Times are processor time, and the best of several: what is asked is what the code costs, not how busy the machine is.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factory import meta, sample, step, tensor, write_run

HELP_S = 0.3
IMPORT_S = 0.25
ATTACH_S = 0.25
"""On top of torch, which takes seconds itself."""

HEAVY = ("torch", "numpy", "pandas", "pyarrow", "rich", "plotly", "dash")

IMPORT = f"""
import sys, time
start = time.process_time()
import gradaudit
print(time.process_time() - start, *[name for name in {HEAVY!r} if name in sys.modules])
"""

ATTACH = """
import torch, time
start = time.process_time()
import gradaudit
gradaudit.attach
print(time.process_time() - start)
"""

OFFLINE = """
import sys
import gradaudit
from gradaudit.reporters import text
report = gradaudit.audit(gradaudit.open_run(sys.argv[1]))
print(text.render(report, width=80, colour=False))
print("torch was imported:", "torch" in sys.modules)
"""


def python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout


def children_s() -> float:
    """Processor time of all processes started and ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    tensors = [tensor(0, "head"), tensor(1, "head.weight", "param_grad", parents=[0])]
    steps = [step(i, param_amax=[1.0]) for i in range(4)]
    samples = [sample(i, t, {-30: 10, 0: 5}) for i in range(4) for t in (0, 1)]
    return write_run(tmp_path / "run", run_meta=meta(tensors), steps=steps, samples=samples)


def test_help_is_instant() -> None:
    times = []
    for _ in range(5):
        before = children_s()
        done = subprocess.run([sys.executable, "-m", "gradaudit", "--help"], check=True, capture_output=True, text=True)
        times.append(children_s() - before)

    assert "gradaudit run" in done.stdout
    assert min(times) < HELP_S


def test_importing_gradaudit_costs_nothing_and_brings_nothing_heavy_along() -> None:
    answers = [python(IMPORT).split() for _ in range(3)]

    assert min(float(seconds) for seconds, *_ in answers) < IMPORT_S
    assert [names for _, *names in answers] == [[], [], []]


@pytest.mark.slow
def test_attach_adds_little_to_what_torch_takes() -> None:
    seconds = [float(python(ATTACH)) for _ in range(3)]

    assert min(seconds) < ATTACH_S


def test_a_run_is_read_and_judged_without_torch(run_folder: Path) -> None:
    output = python(OFFLINE, os.fspath(run_folder))

    assert "head.weight" in output
    assert output.endswith("torch was imported: False\n")


def test_an_import_of_torch_would_be_noticed(run_folder: Path) -> None:
    output = python(OFFLINE.replace("import sys", "import sys, torch", 1), os.fspath(run_folder))

    assert output.endswith("torch was imported: True\n")
