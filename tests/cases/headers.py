"""What a case says about itself: the comment lines under its docstring. README.md explains the syntax."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gradaudit.analysis.report import Place

HEADER = re.compile(r"# (must find|may find|must not find|verdict|raises): (.+)")

KEYS = ("must find", "may find", "must not find", "verdict", "raises")


@dataclass(frozen=True, slots=True)
class Demand:
    """A finding that must be there: at `place` where one is given, the first of all if `lead`."""

    id: str
    place: str | None
    lead: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One script and what must, may and must not be found in it."""

    path: Path
    demands: tuple[Demand, ...]
    allowed: frozenset[str]
    forbidden: frozenset[str]
    verdict: str
    raises: str | None

    @property
    def is_healthy(self) -> bool:
        """Whether nothing at all may alarm."""
        return self.verdict == "no alarm"

    @property
    def demanded(self) -> frozenset[str]:
        """The ids of all demands."""
        return frozenset(demand.id for demand in self.demands)


def read_case(path: Path) -> Case:
    """Parse one script's header.

    Raises:
        ValueError: A line between docstring and code is no header, or the verdict is missing.
    """
    said: dict[str, list[str]] = {key: [] for key in KEYS}
    for line in _header_lines(path):
        match = HEADER.fullmatch(line)
        if match is None:
            raise ValueError(f"{path.name}: {line!r} is no header")
        said[match[1]].append(match[2])
    if len(said["verdict"]) != 1:
        raise ValueError(f"{path.name}: exactly one verdict is needed")
    return Case(
        path=path,
        demands=tuple(_demand(text) for text in said["must find"]),
        allowed=_ids(said["may find"]),
        forbidden=_ids(said["must not find"]),
        verdict=said["verdict"][0],
        raises=said["raises"][0] if said["raises"] else None,
    )


def is_at(place: Place, wanted: str, script: Path) -> bool:
    """Whether a place is the one a header names: `<- tag` is a tagged line of the script, else part of the name."""
    if not wanted.startswith("<-"):
        return wanted in place.name
    return place.file is not None and Path(place.file).name == script.name and place.line == _line_of(wanted, script)


def _header_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    end = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    return lines[:end]


def _demand(text: str) -> Demand:
    what, _, where = text.partition(" at ")
    return Demand(id=what.removesuffix(" lead"), place=where or None, lead=what.endswith(" lead"))


def _ids(texts: list[str]) -> frozenset[str]:
    return frozenset(id for text in texts for id in text.split(", "))


def _line_of(tag: str, script: Path) -> int:
    lines = script.read_text(encoding="utf-8").splitlines()
    (line,) = (number for number, text in enumerate(lines, start=1) if text.endswith(f"# {tag}"))
    return line
