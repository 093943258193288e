"""What README.md shows is what the commands print. `--update-golden` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradaudit.cli import main

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- output: (?P<command>.+?) -->\n```\n(?P<text>.*?)```\n", re.DOTALL)


def test_outputs_in_the_readme_are_what_the_commands_print(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = ROOT / "README.md"
    monkeypatch.chdir(ROOT)
    text = readme.read_text(encoding="utf-8")

    def printed(match: re.Match[str]) -> str:
        result = CliRunner().invoke(main, match["command"].split())
        assert result.exit_code == 0, result.output
        return f"<!-- output: {match['command']} -->\n```\n{result.output}```\n"

    fresh = BLOCK.sub(printed, text)

    assert BLOCK.search(text)
    if request.config.getoption("--update-golden"):
        readme.write_text(fresh, encoding="utf-8")
    else:
        assert fresh == text
