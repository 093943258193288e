"""Opens a run folder, finished or still being written, without torch.

A `Run` is a read-only view: run.json is read once, tables are read when asked for and kept. `Run.version` changes
whenever the writer has added something, so a live reader opens the run again only then.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import fields
from functools import cached_property, reduce
from operator import and_
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gradaudit.errors import RunCorrupt, RunNotFound, SchemaMismatch
from gradaudit.formats import NUM_BINS
from gradaudit.schema import RUN_FILE, RUN_FORMAT, SCHEMA_VERSION, TABLES, rank_dir
from gradaudit.store.host import host_id
from gradaudit.store.tables import NO_GRADIENT, OpRow, Samples, Steps, TensorInfo
from gradaudit.store.writer import LAST_KEY

STALE_S = 60.0
"""A writer renews its heartbeat every few seconds; after a minute of silence it is gone, whoever has its pid by now."""


class Run:
    """A recorded run. Made by `open_run`; holds no file open.

    `meta` is run.json as it was read. `ended` is "ok", "exception", "killed" or "running".
    """

    def __init__(self, path: Path, meta: dict[str, Any], ended: str) -> None:
        self.path = path
        self.meta = meta
        self.ended = ended

    @property
    def name(self) -> str:
        """Folder name."""
        return self.path.name

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with data on disk."""
        found = (entry.name.removeprefix("rank-") for entry in self.path.glob("rank-*") if entry.is_dir())
        return tuple(sorted(int(name) for name in found if name.isdigit()))

    def tensors(self, rank: int = 0) -> tuple[TensorInfo, ...]:
        """The tensors table of one rank, indexed by tensor id."""
        path = self.path / RUN_FILE if rank == 0 else self.path / rank_dir(rank) / RUN_FILE
        return _tensor_table(self.meta if rank == 0 else _read_meta(path), path)

    @cached_property
    def steps(self) -> Steps:
        """Rank 0's step table."""
        return self.rank_steps(0)

    def rank_steps(self, rank: int) -> Steps:
        """One rank's step table."""
        table = self._read("steps", rank)
        columns: dict[str, Any] = {}
        for field in TABLES["steps"]:
            if field.name in ("param_amax", "nonfinite"):
                columns[field.name] = _ragged(table[field.name])
            elif field.name in ("weights_nonfinite", "buffers_nonfinite"):
                known = pc.is_valid(table[field.name]).to_numpy()
                lists = _ragged(pc.coalesce(table[field.name], pa.scalar([], table[field.name].type)))
                columns[field.name] = [ids if valid else None for ids, valid in zip(lists, known, strict=True)]
            else:
                columns[field.name] = _column(table[field.name])
        order = np.argsort(columns["step"], kind="stable")
        for name, values in columns.items():
            columns[name] = [values[i] for i in order] if isinstance(values, list) else values[order]
        return Steps(**columns)

    def samples(
        self, *, rank: int = 0, tensors: Iterable[int] | None = None, steps: tuple[int, int] | None = None
    ) -> Samples:
        """Sampled statistics, sorted by (tensor, step).

        Args:
            rank: Whose.
            tensors: Only these tensor ids; reads just their row groups.
            steps: Only steps first..last, both included.
        """
        conditions: list[Any] = []
        if tensors is not None:
            conditions.append(pc.field("tensor").isin(pa.array(list(tensors), pa.int32())))
        if steps is not None:
            conditions.append((pc.field("step") >= steps[0]) & (pc.field("step") <= steps[1]))
        expression = reduce(and_, conditions) if conditions else None
        return _samples(self._read("samples", rank, filters=expression))

    def events(self, *, rank: int = 0) -> list[dict[str, Any]]:
        """The call-order log in order, one dict per event."""
        rows: list[dict[str, Any]] = self._read("events", rank).sort_by("seq").to_pylist()
        return rows

    def ops(self, *, rank: int = 0) -> tuple[OpRow, ...]:
        """The operations of the traced forwards, in order of step and execution."""
        table = self._read("ops", rank).sort_by([("step", "ascending"), ("order", "ascending")])
        rows: list[dict[str, Any]] = table.to_pylist()
        for row in rows:
            row |= {name: tuple(row[name]) for name in ("shape", "inputs", "constants")}
        return tuple(OpRow(**row) for row in rows)

    @property
    def version(self) -> str:
        """Changes when the writer has added something. Reads directory entries only."""
        return run_version(self.path)

    def _read(self, table: str, rank: int, *, filters: Any = None) -> pa.Table:
        folder = self.path / rank_dir(rank)
        for attempt in range(5):
            try:
                return _read_parts(folder, table, filters)
            except FileNotFoundError:
                # parts were merged between listing and opening: list again
                if attempt == 4:
                    raise RunCorrupt(f"{folder} keeps changing while it is read; try again in a moment.") from None
        raise AssertionError("unreachable")


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder for reading.

    Raises:
        RunNotFound: There is no run at `path`.
        RunCorrupt: run.json cannot be read.
        SchemaMismatch: A newer gradaudit wrote it.
    """
    folder = Path(path)
    if not folder.exists():
        raise RunNotFound(f"{folder} does not exist; record a run with: gradaudit run --out {folder} train.py")
    if not (folder / RUN_FILE).is_file():
        raise RunNotFound(f"{folder} is not a gradaudit run (no {RUN_FILE} in it); pass the folder given to --out.")
    meta = _read_meta(folder / RUN_FILE)
    return Run(folder, meta, _how_it_ended(meta))


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run, readable or not."""
    return (path / RUN_FILE).is_file()


def find_runs(root: str | os.PathLike[str]) -> list[Path]:
    """Run folders at or below `root`, two levels deep, newest first."""
    top = Path(root)
    if is_run(top):
        return [top]
    found = [entry.parent for pattern in ("*", "*/*") for entry in top.glob(f"{pattern}/{RUN_FILE}")]
    found = [entry for entry in found if not entry.name.startswith("rank-")]
    return sorted(found, key=lambda entry: (-(entry / RUN_FILE).stat().st_mtime, entry.name))


def run_version(path: Path) -> str:
    """Fingerprint of a run folder's files: names and sizes, and run.json's modification time."""
    entries = []
    try:
        stat = (path / RUN_FILE).stat()
        entries.append(f"{stat.st_mtime_ns}:{stat.st_size}")
        for folder in sorted(entry for entry in path.glob("rank-*") if entry.is_dir()):
            entries += [f"{e.name}:{e.stat().st_size}" for e in os.scandir(folder) if e.name.endswith(".parquet")]
    except FileNotFoundError:
        pass  # a part was merged away just now; the next look sees a settled folder
    return "|".join(sorted(entries))


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunCorrupt(f"{path} cannot be read ({_reason(error)}); record the run again.") from error
    if not isinstance(meta, dict) or meta.get("format") != RUN_FORMAT:
        raise RunNotFound(f"{path} was not written by gradaudit; pass the folder given to --out.")
    version = meta.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{path.parent} was written by a newer gradaudit (schema {version}, this one reads up to "
            f"{SCHEMA_VERSION}); upgrade gradaudit."
        )
    return meta


def _tensor_table(meta: dict[str, Any], path: Path) -> tuple[TensorInfo, ...]:
    known = {field.name for field in fields(TensorInfo)}
    rows = []
    try:
        for row in meta.get("tensors", []):
            kept = {key: value for key, value in row.items() if key in known}
            kept["shape"] = tuple(kept.get("shape", ()))
            kept["parents"] = tuple(kept.get("parents", ()))
            rows.append(TensorInfo(**kept))
    except (AttributeError, TypeError) as error:
        raise RunCorrupt(f"{path} has a broken tensors table ({_reason(error)}); record the run again.") from error
    return tuple(rows)


def _how_it_ended(meta: dict[str, Any]) -> str:
    if meta.get("ended"):
        return str(meta["ended"])
    heartbeat = meta.get("heartbeat_at")
    if not isinstance(heartbeat, (int, float)) or time.time() - heartbeat > STALE_S:
        return "killed"
    return "running" if meta.get("host") != host_id() or _alive(meta.get("pid")) else "killed"


def _alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # alive, and somebody else's
    return True


def _read_parts(folder: Path, table: str, filters: Any) -> pa.Table:
    numbered = [(file.stem.rpartition("-")[2], file) for file in folder.glob(f"{table}-*.parquet")]
    tables = [TABLES[table].empty_table()]
    covered = -1
    for index, file in sorted((int(number), file) for number, file in numbered if number.isdigit()):
        if index > covered:  # else merged into an earlier part and about to be removed
            part, covered = _read_part(file, table, filters)
            tables.append(part)
    return pa.concat_tables(tables)


def _read_part(file: Path, table: str, filters: Any) -> tuple[pa.Table, int]:
    """A part's rows and the index of the last part they include."""
    schema = TABLES[table]
    try:
        # opened once: a merged part may take this one's name between two looks
        with pa.OSFile(str(file)) as source:
            found = pq.read_schema(source)
            missing = [f.name for f in schema if not f.nullable and f.name not in found.names]
            if missing:
                raise RunCorrupt(f"{file} is not a gradaudit {table} part (no column {missing[0]!r}); remove it.")
            source.seek(0)
            part = pq.read_table(source, schema=schema, filters=filters)
            return part, int((found.metadata or {}).get(LAST_KEY, b"-1"))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RunCorrupt(f"{file} cannot be read ({_reason(error)}); remove it or record the run again.") from error


def _column(column: pa.ChunkedArray) -> np.ndarray:
    kind = column.type
    if pa.types.is_boolean(kind):
        if column.null_count == 0:
            return np.asarray(column.to_numpy(), dtype=bool)
        return np.asarray(pc.fill_null(pc.cast(column, pa.int8()), -1).to_numpy())
    if pa.types.is_floating(kind):
        return np.asarray(pc.fill_null(column, float("nan")).to_numpy(), dtype=np.float64)
    return np.asarray(pc.fill_null(column, -1).to_numpy(), dtype=np.int64)


def _ragged(column: pa.ChunkedArray) -> list[np.ndarray]:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([], column.type)
    values = pc.fill_null(combined.flatten(), NO_GRADIENT if pa.types.is_floating(column.type.value_type) else -1)
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(combined).to_numpy(zero_copy_only=False))])
    flat = values.to_numpy(zero_copy_only=False)
    return [flat[start:stop] for start, stop in zip(offsets[:-1].astype(int), offsets[1:].astype(int), strict=True)]


def _samples(table: pa.Table) -> Samples:
    columns = {name: _column(table[name]) for name in TABLES["samples"].names if name != "counts"}
    columns.pop("num_micro_steps")
    counts = np.zeros((table.num_rows, NUM_BINS), dtype=np.int64)
    present = pc.is_valid(table["counts"]).to_numpy()
    flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["counts"].chunks]
    if flat:
        counts[present] = np.concatenate(flat).reshape(-1, NUM_BINS)
    samples = Samples(counts=counts, **columns)
    return samples.select(np.lexsort((samples.step, samples.tensor)))


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".")[:120] if text else type(error).__name__
