"""The rules that keep the code readable, checked rather than remembered."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gradaudit
from gradaudit.store import Run, find_runs, open_run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"gradaudit": ROOT / "gradaudit", "gradaudit_dashboard": ROOT / "dashboard" / "gradaudit_dashboard"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# no pattern here matches its own text
HOMES = rb"(?<![\w.~-])/(?:home|root|Users|work|workspace|mnt)/[A-Za-z0-9_.-]|[A-Z]:\\Users\\[A-Za-z]"
MACHINE_PATH = re.compile(re.escape(str(ROOT)).encode() + b"|" + HOMES)
PACKAGE_HOST = re.compile(rb"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|[\w.-]+/simple/")

LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


def sources() -> Iterator[Path]:
    for folder in PACKAGES.values():
        yield from sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".js", ".css", ".html"))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def published() -> list[Path]:
    """Files that git has or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        num_lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return num_lines


def long_functions(text: str) -> list[str]:
    functions = [f for f in ast.walk(ast.parse(text)) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [f"{f.name}: {code_lines(f)} lines" for f in functions if code_lines(f) > MAX_FUNCTION_LINES]


def test_nobody_imports_what_is_above_it() -> None:
    done = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, check=False)

    output = done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
    assert done.returncode == 0, output
    assert "0 broken" in output


def test_no_file_is_longer_than_one_can_keep_in_mind() -> None:
    lengths = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}

    assert len(lengths) > 80
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    code = {shown(path): path.read_text(encoding="utf-8") for path in sources() if path.suffix == ".py"}

    assert {name: long_functions(text) for name, text in code.items() if long_functions(text)} == {}


def test_the_length_of_a_function_is_told_without_its_docstring() -> None:
    body = "    x = 1\n" * 59
    docstring = '    """Says\n\n    much.\n    """\n'

    assert long_functions(f"def fits():\n{docstring}{body}") == []
    assert long_functions(f"def does_not():\n{body}    return x\n") == ["does_not: 61 lines"]


def test_the_public_names_are_sorted_and_there() -> None:
    assert gradaudit.__all__ == sorted(gradaudit.__all__)
    assert [name for name in gradaudit.__all__ if getattr(gradaudit, name, None) is None] == []


def test_the_version_is_the_same_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)

    assert project()["project"]["version"] == gradaudit.__version__ == released[0]


def test_every_package_is_installed() -> None:
    with_code = {
        ".".join((name, *file.parent.relative_to(folder).parts))
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*.py")
    }

    listed = project()["tool"]["setuptools"]["packages"]

    assert sorted(listed) == sorted(with_code)
    folders = [PACKAGES[name.split(".")[0]].joinpath(*name.split(".")[1:]) for name in listed]
    assert [shown(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("pattern", [MACHINE_PATH, PACKAGE_HOST], ids=["machine path", "package host"])
def test_no_published_file_tells_where_it_was_made(pattern: re.Pattern[bytes]) -> None:
    matches = {shown(path): pattern.search(path.read_bytes()) for path in published()}

    assert {name: match.group() for name, match in matches.items() if match is not None} == {}


@pytest.mark.parametrize("folder", ["home", "root", "Users", "mnt"])
def test_a_path_of_a_machine_would_be_noticed(folder: str) -> None:
    assert MACHINE_PATH.search(f'open("/{folder}/ann/data.txt")'.encode())
    assert not MACHINE_PATH.search(f'open("{folder}/ann/data.txt")'.encode())


def call_sites(run: Run) -> Iterator[str]:
    yield from run.meta["argv"]
    yield from (entry["file"] for entry in run.meta["autocast"] if entry["file"])
    for rank in run.ranks:
        yield from (event["file"] for event in run.events(rank=rank) if event["file"])


@pytest.mark.parametrize("path", find_runs(ROOT / "sample_runs"), ids=lambda path: path.name)
def test_a_sample_run_knows_no_absolute_path(path: Path) -> None:
    # Parquet is compressed: a search through its bytes finds nothing
    sites = set(call_sites(open_run(path)))

    assert sites
    assert [site for site in sites if Path(site).is_absolute()] == []
