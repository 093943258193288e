from __future__ import annotations

import math

import pytest

from gradaudit.analysis.report import Evidence, Outlook, Place
from gradaudit.analysis.zones import ZONES
from gradaudit.reporters import words
from gradaudit.reporters.palette import ZONE_COLOURS
from gradaudit.reporters.rows import ZONES_BY_HARM
from gradaudit.store import TensorInfo
from tests.unit.reporters.reports import layer


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1e-9, "<0.01 %"),
        (0.0000999, "<0.01 %"),
        (0.0001, "0.0100 %"),
        (0.00123, "0.123 %"),
        (0.009996, "1.00 %"),
        (0.01, "1.00 %"),
        (0.099949, "9.99 %"),
        (0.123456, "12.3 %"),
        (0.9994, "99.9 %"),
        (0.9996, ">99.9 %"),
        (1.0, "100 %"),
        (1.0000001, "100 %"),
        (math.nan, "not known"),
        (None, "not known"),
    ],
)
def test_a_share_keeps_three_digits_and_never_rounds_to_nothing_or_to_all(share: float | None, text: str) -> None:
    assert words.format_share(share) == text


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (65536.0, "2^16 (65,536)"),
        (1.0, "2^0 (1)"),
        (0.25, "2^-2 (0.25)"),
        (3000.0, "2^11.55 (3,000)"),
        (2.0**-43, "2^-43 (1.137e-13)"),
        (2.0**60, "2^60 (1.153e+18)"),
        (0.0, "0"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (None, "none"),
    ],
)
def test_a_loss_scale_is_a_power_of_two_with_the_number_behind(scale: float | None, text: str) -> None:
    assert words.format_scale(scale) == text


def test_an_edge_that_nothing_bounds_is_called_so() -> None:
    assert words.format_log2(None) == "unbounded"
    assert words.format_log2(-2) == "2^-2 (0.25)"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234567, "1,234,567"), (2.0, "2"), (0.42134, "0.4213"), (math.inf, "inf"),
                        (-math.inf, "-inf"), (math.nan, "NaN"), (1e20, "1e+20")]
)  # fmt: skip
def test_a_number_is_whole_or_has_four_digits(value: float, text: str) -> None:
    assert words.format_number(value) == text


def test_a_ratio_has_its_unit_and_an_unknown_one_says_so() -> None:
    assert words.format_db(12.345) == "12.3 dB"
    assert words.format_db(math.inf) == "inf dB"
    assert words.format_db(None) == "not known"
    assert words.format_db(math.nan) == "not known"


def test_steps_are_singular_when_there_is_one() -> None:
    assert words.format_steps((7, 7)) == "step 7"
    assert words.format_steps((0, 12345)) == "steps 0 to 12,345"
    assert words.plural(1, "step") == "1 step"
    assert words.plural(0, "step") == "0 steps"


def test_a_skip_count_shows_its_bounds_only_where_they_differ() -> None:
    assert words.format_skipped(Outlook(4, 0.01, None)) == "4"
    assert words.format_skipped(Outlook(4, 0.01, None, 4, 4)) == "4"
    assert words.format_skipped(Outlook(4, 0.01, None, 2, 9)) == "4 (between 2 and 9)"


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (Evidence("sqnr_db", 12.34, "dB", 40.0), "SQNR 12.3 dB (threshold 40.0 dB)"),
        (Evidence("min_sqnr_db", 12.34, "dB"), "min SQNR 12.3 dB"),
        (Evidence("flushed_frac", 0.412, "of its elements"), "flushed 41.2 % of its elements"),
        (Evidence("skip_rate", 0.00001, "of attempted steps"), "skip rate <0.01 % of attempted steps"),
        (Evidence("low_edge_log2", 13), "low edge 2^13"),
        (Evidence("num_skipped", 1200, "steps", 3), "skipped 1,200 steps (threshold 3 steps)"),
        (Evidence("loss_scale", 65536.0), "loss scale 2^16 (65,536)"),
        (Evidence("dtype", "float16"), "dtype float16"),
    ],
)
def test_evidence_reads_as_a_number_with_unit_and_threshold(evidence: Evidence, text: str) -> None:
    assert words.format_evidence(evidence) == text


def test_a_place_names_its_kind_and_line() -> None:
    assert words.place_detail(Place("module", "fc")) == "module"
    assert words.place_detail(Place("call_site", "backward", "train.py", 41)) == "call site, train.py:41"
    assert words.place_detail(Place("op", "softmax", "train.py")) == "op, train.py"


def test_characters_a_terminal_acts_on_become_visible_and_others_stay() -> None:
    assert words.clean("\x1b[31m\u202e\r\n\ud800") == r"\x1b[31m\u202e\r\n\ud800"
    assert words.clean("\u5c42.0.\u03b1 b") == "\u5c42.0.\u03b1 b"
    assert words.prose("  two\n lines\t") == "two lines"


def test_a_layer_is_labelled_as_its_tensor_is() -> None:
    for kind in ("op_grad", "param_grad"):
        tensor = TensorInfo(id=0, kind=kind, fqn="fc", op="MulBackward0")
        assert words.layer_label(layer("fc", kind=kind, op="MulBackward0")) == tensor.label


def test_every_zone_has_a_colour_a_word_a_meaning_and_a_rank() -> None:
    assert tuple(ZONE_COLOURS) == ZONES
    assert tuple(words.ZONE_WORDS) == ZONES
    assert tuple(words.ZONE_MEANINGS) == ZONES
    assert sorted(ZONES_BY_HARM) == sorted(ZONES)
    assert len(set(ZONE_COLOURS.values())) == len(ZONES)
