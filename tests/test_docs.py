"""The documentation says what the code does: its examples run, its outputs are printed, its links lead somewhere.

`--update-golden` writes the outputs it shows anew.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import gradaudit
from gradaudit import schema
from gradaudit.analysis import context, overflows, recommend, windows
from gradaudit.analysis.audit import CHECK_IDS
from gradaudit.analysis.checks import gradient_overflow, gradient_zones, loss_scale, scale_course
from gradaudit.analysis.history import CALIBRATION_GAP
from gradaudit.capture import calls
from gradaudit.cli import COMMANDS, main
from gradaudit.formats import MAX_EXPONENT, MIN_EXPONENT, NUM_BINS
from gradaudit.store.reader import STALE_S
from gradaudit.store.writer import MERGE_FANIN
from tests.factory import meta, sample, step, tensor, write_run

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])

SECTION = re.compile(r"^## (?P<name>.+?)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNABLE = re.compile(r"^<!-- runnable -->\n```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"<!-- output: (?P<command>.+?)(?: \| head -(?P<lines>\d+))? -->\n```\n(?P<text>.*?)```\n", re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ROW = re.compile(r"^\| (?P<names>`[^|]+) \|", re.MULTILINE)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def sections(path: Path) -> dict[str, str]:
    return {match["name"]: match["text"] for match in SECTION.finditer(read(path))}


def documented(text: str) -> list[str]:
    """The names that the first column of a section's tables explains."""
    return [name for match in ROW.finditer(text) for name in re.findall(r"`(\w+)`", match["names"])]


FINDINGS = sections(DOCS / "findings.md")
RUN_FORMAT = sections(DOCS / "run-format.md")

# Findings


def test_every_check_has_its_section_and_every_section_its_check() -> None:
    assert sorted(FINDINGS) == sorted(CHECK_IDS)


@pytest.mark.parametrize("name", CHECK_IDS)
def test_a_finding_is_explained_from_what_it_means_to_what_to_do(name: str) -> None:
    text = FINDINGS[name]

    places = [text.find(label) for label in ("- **Fires**", "- **Not this:**", "- **Do:**")]
    assert -1 not in places
    assert places == sorted(places)
    assert text[: places[0]].strip()
    assert f"[{name}](#{name})" in read(DOCS / "findings.md").partition("\n## ")[0], "not in the table at the top"


EXAMPLES = [
    (name, command.split())
    for name, text in FINDINGS.items()
    for command in re.findall(r"^- \*\*See:\*\* `gradaudit (.+)`$", text, re.MULTILINE)
]


@pytest.mark.parametrize(("name", "command"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_of_a_finding_shows_it(name: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    result = CliRunner().invoke(main, [*command, "--format", "json"])

    assert name in [finding["id"] for finding in json.loads(result.output)["findings"]]


CLAIMS = [
    ("scale-zero", scale_course.RECIPROCAL_OVERFLOWS == 2.0**-128, "at or below 2^-128"),
    ("scale-at-floor", scale_course.MIN_PINNED, "at least {} unexplained overflows"),
    ("scale-at-floor", 100 * scale_course.PINNED_SHARE, "at least {:g} % of the updates"),
    ("scale-collapse", scale_course.MIN_UNEXPLAINED, "at least {} overflows are unexplained"),
    ("scale-collapse", scale_course.MIN_UNEXPLAINED - 1, "at least {} backoffs lower"),
    ("scale-collapse", scale_course.RECOVERED_UPDATES, "{} clean updates"),
    ("scale-decay", scale_course.DECAY_LOG2, "at least {} separate drops"),
    ("scale-decay", 2**scale_course.DECAY_LOG2, "a factor of {}"),
    ("scale-thrashing", scale_course.FEW_OVERFLOWS, "two standard deviations, plus {}"),
    ("scale-calibration", CALIBRATION_GAP, "at most {} clean updates apart"),
    ("scale-runaway", loss_scale.RUNAWAY_GROWTHS, "at least {} times"),
    ("scale-never-grew", context.TARGET_DB, "{:g} dB"),
    ("static-scale-unsafe", loss_scale.MIN_STATIC_UPDATES, "at least {} updates"),
    ("static-scale-unsafe", loss_scale.STATIC_INTERVAL, "{:,} or more"),
    ("gradient-underflow", context.TARGET_DB, "below {:g} dB"),
    ("gradient-underflow", 100 * context.QUANTILE, "more than {:g} % of the sampled steps"),
    ("gradient-underflow", 100 * gradient_zones.LOST_SHARE, "at least {:g} % of the sampled steps"),
    ("gradient-underflow", 100 * gradient_zones.FLUSHED_ZERO_SHARE, "at least {:g} % of the elements"),
    ("gradient-underflow", context.CANCELS_DB, "below {:g} dB at any scale"),
    ("gradient-headroom-low", gradient_overflow.MIN_TREND_SAMPLES, "at least {} sampled steps"),
    ("gradient-headroom-low", gradient_overflow.RISE_LOG2, "at least {:g} binade"),
    ("gradient-headroom-low", gradient_overflow.HEADROOM_LOG2, "within {} binades"),
    ("scale-window-empty", 100 * windows.EMPTY_SHARE, "at least {:g} % of the sampled steps"),
    ("layer-without-gradient", gradient_zones.MIN_SILENT_STEPS, "at least {} steps"),
]


@pytest.mark.parametrize(("name", "value", "claim"), CLAIMS, ids=[f"{name}: {claim}" for name, _, claim in CLAIMS])
def test_a_threshold_is_what_the_page_says(name: str, value: float, claim: str) -> None:
    assert value
    assert claim.format(value) in " ".join(FINDINGS[name].split())


CONCEPTS = [
    (100 * windows.OVERFLOW_SHARE, "at most {:g} % of the steps"),
    (round(1 / recommend.TARGET_SKIP_RATE), "one skipped step in a thousand" if True else "{}"),
    (recommend.MIN_INTERVAL, "no shorter than {} steps"),
    (100 * (1 - context.QUANTILE), "what {:g} % of the sampled, applied steps reach"),
    (overflows.LIMIT_LOG2, "65,520"),
]


# Run format


@pytest.mark.parametrize("table", schema.TABLES)
def test_every_column_is_explained_in_its_place(table: str) -> None:
    assert documented(RUN_FORMAT[table]) == schema.TABLES[table].names


def test_every_key_of_a_recorded_run_is_explained() -> None:
    recorded = [json.loads(read(path)) for path in sorted((ROOT / "sample_runs").glob("*/run.json"))]
    keys = {key for run in recorded for key in (*run, *run["tensors"][0])}

    assert recorded
    assert set(documented(RUN_FORMAT["run.json"])) == keys


def test_the_numbers_of_the_run_format_are_those_of_the_code() -> None:
    text = " ".join(read(DOCS / "run-format.md").split())

    assert f"{NUM_BINS} counts of floor(log2 abs x), from {MIN_EXPONENT} to {MAX_EXPONENT}" in text
    assert f"after the first {calls.NUM_CALL_SITES} calls of a kind" in text
    assert f"no older than {STALE_S:g} seconds" in text
    assert f"8 log{MERGE_FANIN}(n) parts" in text
