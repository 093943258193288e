"""The same findings through `gradaudit run`, on scripts that know nothing of gradaudit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradaudit.analysis.audit import audit
from gradaudit.analysis.report import AuditReport
from gradaudit.store import open_run
from tests.findings.training import alarming, assert_healthy, assert_sound, evidence, informing, places, the

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
x = torch.randn(64, 32)
y = x[:, :8].argmax(1)
"""

LOOP = """
for step in range({steps}):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y){times}
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def run(tmp_path: Path, body: str) -> AuditReport:
    script = tmp_path / "train.py"
    script.write_text(HEAD + body, encoding="utf-8")
    command = [sys.executable, "-m", "gradaudit", "run", "--quiet", "--every", "5", "--out", str(tmp_path / "run")]
    done = subprocess.run([*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return audit(open_run(tmp_path / "run"))


def test_an_ordinary_script_is_healthy(tmp_path: Path) -> None:
    report = run(tmp_path, 'scaler = torch.amp.GradScaler("cpu")\n' + LOOP.format(steps=60, times=""))

    assert_healthy(report)
    assert report.run.num_steps == 60


def test_a_scaler_without_a_device_switches_itself_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = run(tmp_path, "scaler = torch.amp.GradScaler()\n" + LOOP.format(steps=30, times=""))

    assert_sound(report)
    assert alarming(report) == {"autocast-inactive": "warning", "missing-loss-scaling": "warning"}
    finding = the(report, "missing-loss-scaling")
    assert "disabled" in finding.summary
    assert finding.consequence_of == "autocast-inactive"
    source = (tmp_path / "train.py").read_text(encoding="utf-8").splitlines()
    (place,) = finding.where
    assert place.file == "train.py"
    assert place.line is not None
    assert "torch.autocast" in source[place.line - 1]


def test_resuming_from_a_file_without_the_scaler(tmp_path: Path) -> None:
    body = """
import os
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
"""
    save = '\ntorch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")\n'
    (tmp_path / "first.py").write_text(HEAD + body + LOOP.format(steps=20, times="") + save, encoding="utf-8")
    subprocess.run([sys.executable, "first.py"], cwd=tmp_path, check=True, timeout=120)
    report = run(tmp_path, body + LOOP.format(steps=30, times=""))

    assert_sound(report)
    assert alarming(report) == {"resume-reset-scale": "warning"}
    assert places(the(report, "resume-reset-scale")) == {"AdamW"}
    assert informing(report) == {"scale-calibration"}


def test_a_scale_put_back_by_hand_and_a_tiny_loss(tmp_path: Path) -> None:
    thrashing = 'scaler = torch.amp.GradScaler("cpu")\n' + LOOP.format(steps=100, times="")
    report = run(tmp_path, thrashing + "    if step % 20 == 19:\n        scaler.update(2.0**28)\n")

    assert set(alarming(report)) == {"scale-thrashing", "gradient-overflow"}
    assert evidence(the(report, "scale-thrashing"))["num_bursts"] >= 4
