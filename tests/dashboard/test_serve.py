from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradaudit.cli import main
from tests.dashboard import runs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return runs.one_step(tmp_path / "a")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def dashboard(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["dashboard", *(str(item) for item in arguments), "--no-open"])


def one_sentence(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nope'} does not exist" in one_sentence(dashboard(tmp_path / "nope"))


def test_a_folder_without_runs_is_one_sentence(tmp_path: Path) -> None:
    assert f"{tmp_path} holds no gradaudit run" in one_sentence(dashboard(tmp_path))


def test_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("", encoding="utf-8")

    assert "is a file" in one_sentence(dashboard(tmp_path / "f"))


def test_without_a_folder_the_default_one_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert "there is no gradaudit-runs here" in one_sentence(dashboard())


def test_a_port_in_use_is_one_sentence_with_the_way_out(run: Path, taken: int) -> None:
    message = one_sentence(dashboard(run, "--port", taken))

    assert f"Port {taken} on 127.0.0.1 is in use" in message
    assert "--port 0" in message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", ""])
def test_an_address_others_could_reach_is_refused(run: Path, host: str) -> None:
    assert "without a password" in one_sentence(dashboard(run, "--host", host))


def test_a_missing_library_is_named_with_the_command_that_installs_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gradaudit_dashboard.serve", None)

    assert 'pip install "gradaudit[dashboard]"' in one_sentence(dashboard(run))


def test_it_serves_a_free_port_prints_where_and_ends_within_a_second_of_ctrl_c(tmp_path: Path) -> None:
    runs.one_step(tmp_path / "gradaudit-runs" / "a")
    command = [sys.executable, "-c", "from gradaudit.cli import main; main()", "dashboard", "--port", "0", "--no-open"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as server:
        assert server.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
        assert url is not None
        with urllib.request.urlopen(url[0], timeout=10) as answer:
            assert answer.status == 200

        asked = time.monotonic()
        server.send_signal(signal.SIGINT)
        server.wait(timeout=10)

        assert time.monotonic() - asked < 1.0
        assert server.returncode == 0
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()
