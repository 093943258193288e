"""The offline commands with the real analysis, on a run written to disk, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.factory import meta, sample, step, tensor, write_run

SCRIPT = """
import sys
from gradaudit.cli import main
status = main(sys.argv[1:], standalone_mode=False)
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps at 2^16; step 3 overflowed; one of the two layers is half subnormal."""
    tensors = [tensor(0, "head"), tensor(1, "body.fc1")]
    steps = [step(i, skipped=i == 3, found_inf=i == 3) for i in range(20)]
    samples = [sample(i, 0, {-2: 40, -3: 24}) for i in range(20)] + [
        sample(i, 1, {-10: 32, -18: 32}) for i in range(20)
    ]
    return write_run(tmp_path_factory.mktemp("runs") / "a", run_meta=meta(tensors), steps=steps, samples=samples)


@pytest.mark.parametrize(
    "args",
    [
        ["report"], ["report", "--format", "json"], ["report", "--format", "markdown"], ["report", "--format", "html"],
        ["recommend"], ["recommend", "--format", "json"], ["replay", "--growth-interval", "5"],
        ["replay", "--format", "json"], ["compare"], ["compare", "--format", "json"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_offline_command_answers_without_torch(run_dir: Path, args: list[str]) -> None:
    command, *options = args
    folders = [str(run_dir)] * (2 if command == "compare" else 1)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, command, *folders, *options],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.strip()
