"""Two processes joined by gloo: ranks that disagree, and ranks that do not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gradaudit
from gradaudit.analysis.report import AuditReport
from tests.findings.training import assert_sound, evidence, places, the

SCRIPT = """
import sys, torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
shared = sys.argv[1] == "shared"
net = nn.parallel.DistributedDataParallel(model) if shared else model
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
for step in range(12):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(x).float().square().mean()
    if rank == 1 and step == 5:
        loss = loss * 1e8  # this rank alone overflows
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def run_on_two(folder: Path, *args: str) -> AuditReport:
    """The script on two ranks, as torchrun would start it."""
    (folder / "train.py").write_text(SCRIPT)
    port = str(free_port())
    command = [sys.executable, "-m", "gradaudit", "run", "--quiet", "--out", str(folder / "run"), "train.py", *args]
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            },
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        assert [process.wait(timeout=240) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return gradaudit.audit(gradaudit.open_run(folder / "run"))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on the loopback device"),
]


def test_a_rank_that_skips_alone_is_found_at_its_first_step(tmp_path: Path) -> None:
    report = run_on_two(tmp_path, "apart")
    assert_sound(report)
    finding = the(report, "rank-disagreement")
    assert (finding.severity, finding.steps) == ("error", (5, 11))
    assert {"0", "1"} <= places(finding)
    assert evidence(finding)["rank_0"] == "applied"
    assert evidence(finding)["rank_1"] == "skipped"


def test_ranks_that_share_their_gradients_agree(tmp_path: Path) -> None:
    report = run_on_two(tmp_path, "shared")
    (check,) = [check for check in report.checks if check.id == "rank-disagreement"]
    assert check.status == "passed"
    assert report.run.num_skipped == 1
