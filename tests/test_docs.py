"""The documentation says what the code does: its examples run, its outputs are printed, its links lead somewhere.

`--update-golden` writes the outputs it shows anew.
"""

from __future__ import annotations

import ast
import json
import math
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from gradaudit import analysis, capture, schema
from gradaudit.analysis.audit import CHECK_IDS
from gradaudit.cli import COMMANDS, main
from gradaudit.formats import MAX_EXPONENT, MIN_EXPONENT, NUM_BINS, NumberFormat
from gradaudit.store.reader import STALE_S
from gradaudit.store.writer import MERGE_FANIN
from tests.cases.headers import read_case
from tests.factory import meta, sample, step, tensor, write_run

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])

SECTION = re.compile(r"^## (?P<name>.+?)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNABLE = re.compile(r"^<!-- runnable -->\n```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(
    r"<!-- output: (?P<command>.+?)(?: \| head -(?P<lines>\d+))? -->\n```\n(?P<text>.*?)```\n", re.DOTALL
)
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
    top = read(DOCS / "findings.md").partition("\n## ")[0]
    assert re.search(rf"^\| \[{name}\]\(#{name}\)(?: \| [^|]+){{2}} \|$", top, re.MULTILINE), "not in the first table"


NEEDS = re.compile(
    r"^\| \[(?P<name>.+?)\]\(#.+?\) \| [^|]+ \| \[.+?\]\((?P<shown_by>.+?)\) \| \[.+?\]\((?P<alike>.+?)\) "
    r"\| (?P<limits>[^|]+) \|$",
    re.MULTILINE,
)

NEEDED = [match.groupdict() for match in NEEDS.finditer(read(DOCS / "findings.md").partition("\n## ")[0])]
"""The second table at the top: where each finding is shown, what looks like it, and where it ends."""


def test_the_table_of_what_a_finding_needs_is_whole() -> None:
    assert [row["name"] for row in NEEDED] == list(CHECK_IDS)


def is_shown(name: str, script: Path) -> bool:
    """Whether a case demands a finding, a sample's report has it, or a test file is about it."""
    if script.parent.name == "findings":
        return f'"{name}"' in read(script)
    if script.parent.name == "sample_runs":
        return name in [found["id"] for found in json.loads(read(script.with_suffix(".report.json")))["findings"]]
    return name in read_case(script).demanded


@pytest.mark.parametrize("row", NEEDED, ids=[row["name"] for row in NEEDED])
def test_what_shows_a_finding_demands_it_and_what_looks_like_it_forbids_it(row: dict[str, str]) -> None:
    name, shown_by, alike = row["name"], (DOCS / row["shown_by"]).resolve(), (DOCS / row["alike"]).resolve()

    assert is_shown(name, shown_by)
    if alike.parent.name == "healthy":
        case = read_case(alike)
        assert case.is_healthy
        assert name in case.forbidden
    elif alike.parent.name == "sample_runs":
        assert not is_shown(name, alike)
    else:
        assert is_shown(name, alike), "its tests hold the look-alike too"


LIMITS = [
    ("scale-at-floor", "MIN_PINNED", "needs {} overflows"),
    ("scale-collapse", "MIN_UNEXPLAINED", "needs {} unexplained overflows"),
    ("scale-decay", "DECAY_LOG2", "needs {} separate drops"),
    ("scale-runaway", "RUNAWAY_GROWTHS", "needs {} growths"),
    ("static-scale-unsafe", "MIN_STATIC_UPDATES", "needs {} updates"),
    ("gradient-headroom-low", "MIN_TREND_SAMPLES", "needs {} samples"),
    ("scale-window-empty", "MAX_STEPS", "{} of them"),
    ("layer-without-gradient", "MIN_SILENT_STEPS", "needs {} steps"),
    ("divergence", "MIN_RISES", "needs {} new highs"),
    ("never-applied", "MIN_NEVER_APPLIED", "needs {} steps"),
    ("scheduler-ahead", "MIN_AHEAD", "needs {} advances"),
]


@pytest.mark.parametrize(("name", "expression", "claim"), LIMITS, ids=[": ".join(limit) for limit in LIMITS])
def test_a_number_among_the_limits_is_that_of_the_code(name: str, expression: str, claim: str) -> None:
    (limits,) = (row["limits"] for row in NEEDED if row["name"] == name)
    assert claim.format(value_of(expression)) in limits


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
    ("scale-zero", "RECIPROCAL_OVERFLOWS == 2.0**-128", "at or below 2^-128"),
    ("scale-at-floor", "MIN_PINNED", "at least {} unexplained overflows"),
    ("scale-at-floor", "100 * PINNED_SHARE", "at least {:g} % of the updates"),
    ("scale-collapse", "MIN_UNEXPLAINED", "at least {} overflows are unexplained"),
    ("scale-collapse", "MIN_UNEXPLAINED - 1", "at least {} backoffs lower"),
    ("scale-collapse", "RECOVERED_UPDATES", "{} clean updates"),
    ("scale-decay", "DECAY_LOG2", "at least {} separate drops"),
    ("scale-decay", "2**DECAY_LOG2", "a factor of {}"),
    ("scale-thrashing", "FEW_OVERFLOWS", "two standard deviations, plus {}"),
    ("scale-calibration", "CALIBRATION_GAP", "at most {} clean updates apart"),
    ("scale-runaway", "RUNAWAY_GROWTHS", "at least {} times"),
    ("scale-never-grew", "TARGET_DB", "{:g} dB"),
    ("static-scale-unsafe", "MIN_STATIC_UPDATES", "at least {} updates"),
    ("static-scale-unsafe", "STATIC_INTERVAL", "{:,} or more"),
    ("gradient-underflow", "TARGET_DB", "below {:g} dB"),
    ("gradient-underflow", "100 * QUANTILE", "more than {:g} % of the sampled steps"),
    ("gradient-underflow", "100 * LOST_SHARE", "at least {:g} % of the sampled steps"),
    ("gradient-underflow", "FP16.flush_log2 + ATTENUATION_LOG2", "below 2^{}"),
    ("gradient-underflow", "100 * FLUSHED_ZERO_SHARE", "at least {:g} % of the elements"),
    ("gradient-underflow", "CANCELS_DB", "below {:g} dB at any scale"),
    ("gradient-headroom-low", "MIN_TREND_SAMPLES", "at least {} sampled steps"),
    ("gradient-headroom-low", "RISE_LOG2", "at least {:g} binade"),
    ("gradient-headroom-low", "HEADROOM_LOG2", "within {} binades"),
    ("scale-window-empty", "100 * EMPTY_SHARE", "at least {:g} % of the sampled steps"),
    ("layer-without-gradient", "MIN_SILENT_STEPS", "at least {} steps"),
    ("forward-overflow", "FP16.max_value", "largest finite number {:,.0f}"),
    ("forward-overflow", "FP16.overflow_at", "{:,.0f} and more round to inf"),
    ("forward-overflow", "NUM_NEAR", "others, up to {},"),
    ("forward-overflow", "MASK_AT", "constants from {:,.0f} up"),
    ("forward-overflow", "FAR_OUTSIDE", "beyond {:g} times the limit"),
    ("forward-headroom-low", "NEAR_LIMIT", "reached {:,.0f}"),
    ("forward-headroom-low", "MIN_GROWTH_SAMPLES", "From {} samples on"),
    ("forward-headroom-low", "MIN_RISE_LOG2", "by {:g} binades or more"),
    ("attention-logits-overflow", "FEW_OPS", "within {} operations"),
    ("reduction-overflow", "FEW_OPS", "within {} operations"),
    ("reduction-overflow", "SAFE_PRODUCTS", "above 1/{} of the limit"),
    ("epsilon-flushed", "FP16.flush_log2", "at most 2^{}"),
    ("epsilon-flushed", "FEW_OPS", "within {} operations"),
    ("critical-op-in-half", "COARSE_LOGITS", "exceeds {:,.0f}"),
    ("critical-op-in-half", "NEAR_LIMIT", "reaches {:,.0f}"),
    ("nonfinite-backward", "SLACK_LOG2", "{} binades to spare"),
    ("nonfinite-backward", "AMPLIFICATION_LOG2", "without clean steps, by {} binades"),
    ("unlocated-nonfinite", "SAME_FAULT_STEPS", "more than {} steps before"),
    ("nonfinite-weight", "DIVIDES_TO_INF == 2.0**-128", "at or below 2^-128"),
    ("divergence", "LOOK_BACK", "the last {} applied steps"),
    ("divergence", "GROWTH_LOG2", "at least {:g} binades"),
    ("divergence", "2**GROWTH_LOG2", "a factor of {:g}"),
    ("divergence", "MIN_RISES", "at least {} new highs"),
    ("divergence", "STEADY", "rank correlation with time of at least {:g}"),
    ("divergence", "BEGUN_AT == 0.5", "at least half of the first losses"),
    ("divergence", "FAST_LOG2", "less than {:g} binades per step"),
    ("clip-before-unscale", "100 * HELD", "within {:g} %"),
    ("clip-before-unscale", "MIN_HELD_PARAMS", "at least {} parameters"),
    ("clip-before-unscale", "MIN_HELD_STEPS", "at {} steps or more"),
    ("step-bypasses-scaler", "100 * SAME", "within {:g} %"),
    ("unscaled-backward", "100 * SAME", "within {:g} %"),
    ("hysteresis-growth-bug", "100 * SAME", "within {:g} %"),
    ("never-applied", "MIN_NEVER_APPLIED", "at least {} steps"),
    ("never-applied", "SEARCH_END", "lies below {:g}"),
    ("scheduler-ahead", "MIN_AHEAD", "at least {} advances"),
    ("scheduler-ahead", "100 * MIN_AHEAD_SHARE", "at least {:g} % of them"),
    ("swallowed-updates", "100 * SWALLOWED_SHARE", "more than {:g} % of all updates"),
    ("swallowed-updates", "100 * MOSTLY_SWALLOWED", "more than {:g} % of those of one parameter"),
    ("swallowed-updates", "MIN_UPDATES", "with at least {}"),
    ("swallowed-updates", "100 * MOSTLY_SWALLOWED", "more than {:g} % of all are"),
    ("optimizer-eps-flushed", "FP16.flush_log2", "at most 2^{}"),
    ("optimizer-eps-flushed", "EPS_STOP_GAP == 1e-4", "`eps=1e-4`"),
    ("gradient-norm-overflow", "SQUARES_OVERFLOW", "norms of at least {:g}"),
    ("gradient-norm-overflow", "MIN_IN_A_ROW", "at least {} steps"),
]
"""What a section says, with the constants of gradaudit.analysis that it says it of."""

CONCEPTS = [
    ("TARGET_DB", "The target is {:g} dB"),
    ("100 * (1 - QUANTILE)", "what {:g} % of the sampled, applied steps reach"),
    ("100 * OVERFLOW_SHARE", "at most {:g} % of the steps"),
    ("MIN_INTERVAL", "no shorter than {} steps"),
    ("-10 * log10(MAX_AVERAGING)", "At most {:g} dB of averaging"),
    ("10 * log10(12 * MANTISSA_MEAN**2 * 4**FP16.mantissa_bits)", "all normal has {:.1f} dB"),
    ("10 * log10(12 * MANTISSA_MEAN**2)", "in the last subnormal binade it is {:.1f} dB"),
    ("FP16.overflow_at", "{:,.0f} and more, or inf"),
    ("FP16.flush_log2", "not zero, up to 2^{}"),
    ("1 / TARGET_SKIP_RATE == 1000", "one skipped step in a thousand"),
    ("RUN_SHARE == 4", "no longer than a quarter of the run"),
    ("MARGIN_LOG2 == 1", "starts one binade below the high edge"),
]

WORKINGS = [
    ("BURST_STEPS", "the {} steps after an overflow"),
    ("FREE_BURST_SAMPLES", "outnumber both {} and the regular samples"),
    ("TRACED_STEPS", "the next {} forwards are traced in full"),
    ("MAX_TRACED", "at most {} steps of a run"),
    ("MAX_CATCHES", "each caught at most {} times"),
    ("MAX_BATCHES", "kept in the run, {} times at most"),
    ("NUM_MEASURED", "{} more steps measure what it does"),
    ("MAX_LINE_SEARCHES", "at {} steps at most"),
]
"""What docs/how-it-works.md says, with the constants of gradaudit.capture that it says it of."""


def constants(package: ModuleType) -> Iterator[tuple[str, object]]:
    """Every number, and every number format, that a module of a package has a name for, with that name."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, value in vars(import_module(module.name)).items():
            if name.isupper() and isinstance(value, (int, float, NumberFormat)):
                yield name, value


def value_of(expression: str, package: ModuleType = analysis) -> float:
    """A number made of constants, wherever in a package they are defined: a name means the same in all its modules."""
    names: dict[str, object] = {"log10": math.log10}
    for name, value in constants(package):
        assert names.setdefault(name, value) == value, f"two constants named {name}"
    value = eval(expression, names)
    assert value, f"{expression} is {value}"
    return float(value) if isinstance(value, float) else int(value)


@pytest.mark.parametrize(("name", "expression", "claim"), CLAIMS, ids=[": ".join(claim) for claim in CLAIMS])
def test_a_threshold_is_what_the_page_says(name: str, expression: str, claim: str) -> None:
    assert claim.format(value_of(expression)) in " ".join(FINDINGS[name].split())


@pytest.mark.parametrize(("expression", "claim"), CONCEPTS, ids=[": ".join(claim) for claim in CONCEPTS])
def test_a_number_in_the_concepts_is_that_of_the_code(expression: str, claim: str) -> None:
    assert claim.format(value_of(expression)) in " ".join(read(DOCS / "concepts.md").split())


@pytest.mark.parametrize(("expression", "claim"), WORKINGS, ids=[": ".join(claim) for claim in WORKINGS])
def test_a_number_in_how_it_works_is_that_of_the_code(expression: str, claim: str) -> None:
    assert claim.format(value_of(expression, capture)) in " ".join(read(DOCS / "how-it-works.md").split())


# Run format


@pytest.mark.parametrize("table", schema.TABLES)
def test_every_column_is_explained_in_its_place(table: str) -> None:
    columns = RUN_FORMAT[table].partition("\n| name | detail |")[0]

    assert documented(columns) == schema.TABLES[table].names


def test_every_key_of_a_recorded_run_is_explained() -> None:
    recorded = [json.loads(read(path)) for path in sorted((ROOT / "sample_runs").glob("*/run.json"))]
    keys = {key for run in recorded for key in (*run, *run["tensors"][0])}

    assert recorded
    assert set(documented(RUN_FORMAT["run.json"])) == keys


def test_the_numbers_of_the_run_format_are_those_of_the_code() -> None:
    text = " ".join(read(DOCS / "run-format.md").split())

    assert f"{NUM_BINS} counts of floor(log2 abs x), from {MIN_EXPONENT} to {MAX_EXPONENT}" in text
    assert f"At most {value_of('MAX_OPS', capture):,} of one step" in text
    assert f"larger than 2^{math.log2(value_of('MAX_RECOMPUTED', capture)):g} elements" in text
    assert f"up to 2^{math.log2(value_of('MAX_BUFFER_NUMEL', capture)):g} elements" in text
    assert f"no older than {STALE_S:g} seconds" in text
    assert f"8 log{MERGE_FANIN}(n) parts" in text


# Commands


def commands_in(text: str) -> Iterator[list[str]]:
    """Words of each `gradaudit ...` in code, up to the end of the command."""
    code = [match["text"] for match in FENCE.finditer(text)] + re.findall(r"`(gradaudit [^`]+)`", text)
    for block in code:
        for line in block.splitlines():
            for command in re.findall(r"(?:^|\s)gradaudit ((?:[^#|&`]|$)+)", line.partition("  #")[0]):
                yield command.split()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_shown_to_newcomers(name: str) -> None:
    shown_commands = [
        words[0] for page in ("README.md", "docs/quickstart.md") for words in commands_in(read(ROOT / page))
    ]

    assert name in shown_commands


def own_options(name: str, words: list[str]) -> set[str]:
    """Options of a shown command, without those that a script gets from `run`."""
    target = [i for i, word in enumerate(words) if word.endswith(".py") or word == "-m"] if name == "run" else []
    return {word.split("=")[0] for word in words[: min(target, default=None)] if word.startswith("--")}


def known_options(name: str) -> set[str]:
    command = main.get_command(click.Context(main), name)
    return {"--help"} | {option for param in command.params for option in param.opts} if command else set()


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_the_pages_name_no_command_or_option_that_there_is_not(page: Path) -> None:
    used = [(words[0], own_options(words[0], words[1:])) for words in commands_in(read(page))]

    assert [(name, options - known_options(name)) for name, options in used if options - known_options(name)] == []
    assert [name for name, _ in used if name not in COMMANDS and not name.startswith("-")] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == DOCS], ids=shown)
def test_outputs_on_a_page_are_what_the_commands_print(
    page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = read(page)

    def printed(match: re.Match[str]) -> str:
        result = CliRunner().invoke(main, match["command"].split())
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()[: int(match["lines"]) if match["lines"] else None]
        return match.group().replace(f"```\n{match['text']}```", "\n".join(["```", *lines, "```"]))

    fresh = OUTPUT.sub(printed, text)

    if request.config.getoption("--update-golden"):
        page.write_text(fresh, encoding="utf-8")
    else:
        assert fresh == text


# Python


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_python_on_a_page_is_python(page: Path) -> None:
    for match in FENCE.finditer(read(page)):
        if match["language"] == "python":
            ast.parse(match["text"])


BLOCKS = [
    pytest.param(match["text"], id=f"{name} {i}")
    for name in ("quickstart.md", "run-format.md")
    for i, match in enumerate(RUNNABLE.finditer(read(DOCS / name)))
]


def test_both_pages_have_blocks_to_run() -> None:
    assert {str(block.id).split()[0] for block in BLOCKS} == {"quickstart.md", "run-format.md"}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an underflowing run in runs/a."""
    tensors = [tensor(0, "head"), tensor(1, "head.weight", "param_grad", dtype="float32", parents=[0])]
    about = meta(tensors, cost={"recording_s": 0.1, "wall_s": 2.0, "every": 1})
    steps = [step(i, skipped=i == 0, found_inf=i == 0, param_amax=[1e-6]) for i in range(12)]
    samples = [sample(i, t, {-23: 90, -20: 10}, num_zero=20) for i in range(1, 12) for t in (0, 1)]
    write_run(tmp_path / "runs" / "a", run_meta=about, steps=steps, samples=samples)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_runs_and_prints_something(code: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})

    assert len(capsys.readouterr().out.splitlines()) >= 1


# Links


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", read(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for match in LINK.finditer(FENCE.sub("", read(page))):
        path, _, anchor = match["target"].partition("#")
        if "://" in path:
            continue
        target = page if not path else page.parent / path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(match["target"])

    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(r"`((?:docs|gradaudit|dashboard|sample_runs|tests|bench)/[\w./-]+)`", read(page))

    assert [name for name in named if not (ROOT / name).exists()] == []


def test_there_are_links_to_check() -> None:
    assert sum(len(LINK.findall(read(page))) for page in PAGES) > 20
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in PAGES}
