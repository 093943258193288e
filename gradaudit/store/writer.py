"""Writes one rank's share of a run folder so that a reader, or a SIGKILL, may come at any moment.

Every file is written under a temporary name and renamed. Flushes make small parts; once eight neighbouring parts of
one size class exist they are merged into the first one's name. Between that rename and the removal of the other seven
a reader could see rows twice, so a merged part says in its metadata up to which index it covers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gradaudit.errors import CaptureError, RunExists
from gradaudit.schema import RUN_FILE, SORT_KEYS, TABLES, part_name, rank_dir

MERGE_FANIN = 8
"""Parts merged at a time: a run of n flushes keeps about 8 * log8(n) parts."""

MAX_MERGED_ROWS = 1_000_000
"""Larger parts are left alone, which bounds the memory of one merge."""

ROW_GROUP_ROWS = 4096
"""Samples are sorted by tensor, so a row group of this size lets one layer's history be read as a range."""

LAST_KEY = b"gradaudit.last"


@dataclass(frozen=True, slots=True)
class _Part:
    index: int
    level: int
    num_rows: int


class RunWriter:
    """Open for the length of a run; not thread-safe: one thread writes.

    Args:
        path: Run folder, created if missing.
        rank: This process's rank; ranks never share a file.
        meta: Initial contents of run.json.
        force: Whether a run already in the folder may be replaced.

    Raises:
        RunExists: The folder holds this rank's data already and `force` is false.
        CaptureError: The folder cannot be created or written.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int, meta: dict[str, Any], force: bool = False) -> None:
        self.path = Path(path)
        self.rank = rank
        self.meta = meta
        self._folder = self.path / rank_dir(rank)
        self._meta_path = self.path / RUN_FILE if rank == 0 else self._folder / RUN_FILE
        self._pending: dict[str, list[pa.RecordBatch]] = {name: [] for name in TABLES}
        self._parts: dict[str, list[_Part]] = {name: [] for name in TABLES}
        self._next_index = dict.fromkeys(TABLES, 0)
        self._written_meta = ""
        self._claim(force)
        try:
            self.write_meta()
        except OSError as error:
            raise CaptureError(_unwritable(self.path, error)) from error

    def _claim(self, force: bool) -> None:
        try:
            taken = self._meta_path.exists() or (self._folder.is_dir() and any(self._folder.iterdir()))
            if taken and not force:
                raise RunExists(f"{self.path} already holds a run; choose another folder with --out or pass --force.")
            self._folder.mkdir(parents=True, exist_ok=True)
            _clear(self._folder)
            if self.rank == 0 and force:
                self._remove_stale_ranks()
        except OSError as error:
            raise CaptureError(_unwritable(self.path, error)) from error

    def _remove_stale_ranks(self) -> None:
        # ranks of this run clear their own folders; an earlier run may have had more
        for folder in self.path.glob("rank-*"):
            number = folder.name.removeprefix("rank-")
            if number.isdigit() and int(number) >= max(self.meta.get("world_size", 1), 1) and folder.is_dir():
                _clear(folder)
                if not any(folder.iterdir()):
                    folder.rmdir()

    def append(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Buffer rows of one table until the next flush."""
        if rows:
            schema = TABLES[table]
            columns = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in schema]
            self._pending[table].append(pa.RecordBatch.from_arrays(columns, schema=schema))

    @property
    def num_pending_rows(self) -> int:
        """Rows a SIGKILL would lose now."""
        return sum(batch.num_rows for batches in self._pending.values() for batch in batches)

    def flush(self) -> None:
        """Write what is buffered as new parts, merge small parts, rewrite run.json if it changed."""
        for table, batches in self._pending.items():
            if batches:
                data = pa.Table.from_batches(batches, schema=TABLES[table])
                index = self._next_index[table]
                self._write_part(table, data, index=index, last=index)
                self._next_index[table] = index + 1
                self._pending[table] = []
                self._parts[table].append(_Part(index, 0, data.num_rows))
                self._merge(table)
        self.write_meta()

    def write_meta(self) -> None:
        """Rewrite run.json atomically, if it changed since the last time."""
        text = json.dumps(self.meta, indent=1, allow_nan=False)
        if text != self._written_meta:
            temporary = self._meta_path.with_name(f".{self._meta_path.name}.tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self._meta_path)
            self._written_meta = text

    def _merge(self, table: str) -> None:
        parts = self._parts[table]
        while len(parts) >= MERGE_FANIN:
            tail = parts[-MERGE_FANIN:]
            level = tail[0].level
            num_rows = sum(part.num_rows for part in tail)
            if any(part.level != level for part in tail) or num_rows > MAX_MERGED_ROWS:
                return
            files = [self._folder / part_name(table, part.index) for part in tail]
            data = pa.concat_tables([pq.read_table(file, schema=TABLES[table]) for file in files])
            self._write_part(table, data, index=tail[0].index, last=self._next_index[table] - 1)
            for file in files[1:]:
                file.unlink()
            parts[-MERGE_FANIN:] = [_Part(tail[0].index, level + 1, num_rows)]

    def _write_part(self, table: str, data: pa.Table, *, index: int, last: int) -> None:
        data = data.sort_by([(key, "ascending") for key in SORT_KEYS[table]])
        data = data.replace_schema_metadata({LAST_KEY: str(last).encode()})
        target = self._folder / part_name(table, index)
        temporary = target.with_name(f".{target.name}.tmp")
        pq.write_table(data, temporary, compression="zstd", row_group_size=ROW_GROUP_ROWS)
        os.replace(temporary, target)


def _clear(folder: Path) -> None:
    """Remove what a writer left here, files under a temporary name included."""
    patterns = [f"{prefix}{table}-*.parquet*" for table in TABLES for prefix in ("", ".")]
    for pattern in (*patterns, "batch-*.pt", ".batch-*.pt.tmp", RUN_FILE, f".{RUN_FILE}*"):
        for old in folder.glob(pattern):
            old.unlink()


def _unwritable(path: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"Cannot write the run to {path} ({reason}); choose a writable folder with --out."
