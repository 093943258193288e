from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import Result

from gradaudit.cli import COMMANDS

Invoke = Callable[..., Result]


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_every_command_without_importing_any(gradaudit: Invoke) -> None:
    script = (
        "import sys; from gradaudit.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'pandas', 'pyarrow', 'torch', 'rich', 'jinja2', 'dash'}\n"
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    result = python("-c", script)

    assert result.stderr.strip() == ""
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout
    assert gradaudit("--help").output == gradaudit().output == gradaudit("-h").output


def test_the_console_script_answers() -> None:
    script = Path(sys.executable).with_name("gradaudit")
    result = subprocess.run([str(script), "--help"], capture_output=True, text=True, timeout=60, check=False)

    assert result.returncode == 0
    assert "gradaudit report" in result.stdout


def test_a_missing_run_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    missing = tmp_path / "missing-dir"
    result = python("-m", "gradaudit", "report", str(missing))

    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert str(missing) in result.stderr
    assert "gradaudit run" in result.stderr


@pytest.mark.parametrize("command", ["report", "recommend", "replay", "compare"])
def test_the_listed_help_agrees_with_the_command(command: str) -> None:
    module, _, attribute = COMMANDS[command][0].partition(":")

    assert getattr(import_module(module), attribute).name == command


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["reprot", "x"], "There is no command 'reprot': the commands are run, report,"),
        (["--foo"], "No such option '--foo'"),
        (["report"], "Missing argument 'DIR'. See gradaudit report --help."),
        (["report", "x", "--fromat", "json"], "No such option '--fromat'"),
        (["report", "x", "--format", "pdf"], "'pdf' is not one of 'text', 'json', 'markdown', 'html'"),
        (["replay", "x", "--init-scale", "abc"], "'abc' is not a valid float"),
        (["compare", "x"], "Missing argument 'DIR_B'"),
    ],
)
def test_a_usage_error_is_one_line_and_status_2(gradaudit: Invoke, args: list[str], words: str) -> None:
    result = gradaudit(*args)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


def test_version_is_the_packages(gradaudit: Invoke) -> None:
    from gradaudit import __version__

    assert __version__ in gradaudit("--version").output


def test_a_reader_that_leaves_early_is_no_error() -> None:
    script = "from gradaudit.cli._common import emit; emit('line\\n' * 1_000_000)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        errors = process.stderr.read()

    assert process.returncode == 0
    assert errors == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_standard_output_is_one_sentence() -> None:
    script = "from gradaudit.cli import _common; _common.emit('x' * 100_000)"
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )

    assert result.stderr.splitlines()[-1].endswith(
        "Standard output cannot be written (No space left on device); use --output."
    )


def test_a_terminal_without_unicode_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    result = python("-c", "from gradaudit.cli._common import emit; emit('\\u5c42.0\\n')")

    assert result.stdout == "\\u5c42.0\n"
