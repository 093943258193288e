"""The demo is a promise: a real fault, found, fixed and shown to be fixed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradaudit.analysis.audit import audit
from gradaudit.store import open_run


@pytest.mark.slow
def test_the_demo_finds_the_fault_and_its_settings_cure_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradaudit", "demo", "--no-serve"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    before, after = (audit(open_run(tmp_path / "gradaudit-runs" / f"demo-{name}")) for name in ("before", "after"))
    assert "gradient-underflow" in {finding.id for finding in before.findings}
    assert after.verdict.level == "healthy"
    losses = [float(loss) for loss in re.findall(r"step 300  loss (\S+)", done.stdout)]
    assert losses[1] < 0.1 < losses[0]
    assert "fixed" in done.stdout
    assert "skipped steps" in done.stdout
