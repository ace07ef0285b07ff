"""Index of run folders in SQLite: metrics, and the position of every trajectory and of every record of an evolution.

files that a run appends to -> read from the cursor to the last complete line -> rows of the index

The index is a temporary file: reading 100,000 trajectories takes a second. A file that was replaced, e.g. by a resumed
run, is read again. Damaged lines are counted and skipped; a file that cannot be read is skipped until it changes.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from alphaapollo.observability.advice import MetricsAdvisor
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.redaction import replace_surrogates
from alphaapollo.viewer.run_folders import find_runs

POLL_SECONDS = 1.0
CHUNK_LINES = 2000
SCHEMA = """
CREATE TABLE runs (id INTEGER PRIMARY KEY, path TEXT UNIQUE);
CREATE TABLE changes (run INTEGER PRIMARY KEY, number INT);
CREATE TABLE files (run INT, name TEXT, inode INT, offset INT, damaged INT, mtime INT, ctime INT,
    error TEXT, PRIMARY KEY (run, name)) WITHOUT ROWID;
CREATE TABLE metrics (run INT, name TEXT, step INT, value REAL, PRIMARY KEY (run, name, step)) WITHOUT ROWID;
CREATE TABLE warnings (run INT, step INT, text TEXT);
CREATE TABLE trajectories (run INT, kind TEXT, step INT, line INT, offset INT, bytes INT, prompt_id INT, sample INT,
    data_source TEXT, reward REAL, accuracy REAL, tokens INT, turns INT, outcome TEXT, end TEXT, stop_reason TEXT,
    PRIMARY KEY (run, kind, step, line)) WITHOUT ROWID;
CREATE INDEX prompts ON trajectories (run, prompt_id);
CREATE TABLE pool (run INT, kind TEXT, candidate TEXT, offset INT, bytes INT, problem INT, is_right INT, failed INT,
    votes_for INT, votes_against INT, PRIMARY KEY (run, kind, candidate, offset)) WITHOUT ROWID;
CREATE INDEX problems ON pool (run, problem);
"""
INSERT_TRAJECTORY = f"INSERT OR REPLACE INTO trajectories VALUES ({', '.join('?' * 16)})"
INSERT_POOL_RECORD = f"INSERT OR REPLACE INTO pool VALUES ({', '.join('?' * 10)})"
ROLLOUT_FILE = re.compile(r"[a-z_]+_[0-9]{6,18}\.jsonl")
MAX_INT = 2**63 - 1  # of SQLite
Integer = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
DATA_TABLES = ("metrics", "warnings", "trajectories", "pool")
KIND_NAMES = {"step": "training", "val": "validation", "val_greedy": "validation, greedy", "results": "evaluation"}


class _Turn(msgspec.Struct):
    reward: float | None = None
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**40)] = 0


class _Trajectory(msgspec.Struct):
    """Fields of a line of the rollout log that the index needs. The others are skipped without being parsed."""

    prompt_id: Integer
    sample: Integer
    data_source: str
    reward: float | None
    components: dict[str, float | None]
    outcome: str
    end: str
    stop_reason: str | None
    turns: list[_Turn]


class _PoolRecord(msgspec.Struct):
    """Fields of a line of pool.jsonl (evolving/pool.py) that the index needs."""

    kind: str
    key: str = ""
    candidate: str | None = ""
    problem: Integer | None = None
    grade: JsonObject | None = None
    failure: str = ""
    votes_for: Integer | None = None
    votes_against: Integer | None = None


_POOL = msgspec.json.Decoder(_PoolRecord)
_TRAJECTORIES, _METRICS = msgspec.json.Decoder(_Trajectory), msgspec.json.Decoder(dict[str, float | None])


class RunIndex:
    """Index of all runs in a folder. One thread updates it; each request reads it through a connection of its own.

    `problem` is why the last update failed, or empty.
    """

    def __init__(self, root: Path, path: Path):
        self.root, self.path, self.problem = root, path, ""
        self._advisors: dict[int, MetricsAdvisor] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._update_until_stopped, name="index", daemon=True)
        with closing(self.connect()) as database:
            database.execute("PRAGMA journal_mode = WAL")
            if not database.execute("SELECT 1 FROM sqlite_master").fetchone():  # another index may have made the file
                database.executescript(SCHEMA)

    def start(self) -> None:
        """Start the thread that updates the index."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def connect(self) -> sqlite3.Connection:
        """Open a connection whose rows can be read by column name."""
        database = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
        database.row_factory = sqlite3.Row
        database.execute("PRAGMA synchronous = OFF")  # the index can be made again
        return database

    def _update_until_stopped(self) -> None:
        while not self._stop.is_set():
            try:
                with closing(self.connect()) as database:
                    self.update(database)
                self.problem = ""
            except Exception as error:  # noqa: BLE001  pages show it; the next update may work
                self.problem = f"{type(error).__name__}: {error}"
            self._stop.wait(POLL_SECONDS)

    def update(self, database: sqlite3.Connection) -> None:
        """Read what the runs have written since the last update, and forget runs that were removed."""
        paths = [str(folder) for folder in find_runs(self.root)]
        found = {path for path in paths if replace_surrogates(path) == path}  # SQLite needs UTF-8
        database.execute("BEGIN IMMEDIATE")
        known = {row["path"]: row["id"] for row in database.execute("SELECT id, path FROM runs")}
        is_changed = found != known.keys()
        for path in known.keys() - found:
            for table, column in (("runs", "id"), *((name, "run") for name in ("files", *DATA_TABLES))):
                database.execute(f"DELETE FROM {table} WHERE {column} = ?", (known[path],))
        for path in sorted(found - known.keys()):
            known[path] = database.execute("INSERT INTO runs (path) VALUES (?)", (path,)).lastrowid or 0
        if is_changed:
            _count_change(database, 0)
        database.commit()
        for path in sorted(found):
            if self._stop.is_set():
                return
            self._update_run(database, known[path], Path(path))

    def _update_run(self, database: sqlite3.Connection, run: int, folder: Path) -> None:
        try:
            check_format(folder)
        except Exception:  # noqa: BLE001  pages show it
            return
        states = {row["name"]: row for row in database.execute("SELECT * FROM files WHERE run = ?", (run,))}
        for name, stat in list_indexed_files(folder):
            inode, ctime = stat.st_ino & MAX_INT, stat.st_ctime_ns & MAX_INT
            state = states.get(name)
            if state is not None and (state["inode"], state["ctime"]) == (inode, ctime):
                continue
            database.execute("BEGIN IMMEDIATE")
            start, damaged, failure = 0, 0, ""
            if state is not None and state["inode"] == inode and state["offset"] <= stat.st_size:
                start, damaged = state["offset"], state["damaged"]
            elif state is not None:
                self._forget_file(database, run, name)
            try:
                start, damaged = self._read_lines(database, run, folder / name, name, start, damaged)
            except sqlite3.DatabaseError:  # the index has failed, not the file
                database.rollback()
                raise
            except Exception as error:  # noqa: BLE001  one bad file must not hide the others
                database.rollback()
                database.execute("BEGIN IMMEDIATE")
                self._forget_file(database, run, name)
                start, damaged, failure = 0, 0, f"{type(error).__name__}: {error}"
            values = (run, name, inode, start, damaged, min(stat.st_mtime_ns, MAX_INT), ctime, failure)
            database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            _count_change(database, run)
            database.commit()

    def _read_lines(
        self, database: sqlite3.Connection, run: int, path: Path, name: str, start: int, damaged: int
    ) -> tuple[int, int]:
        """Index the lines of a file from the offset `start`. Returns the offset after the last complete line, and the
        number of damaged lines."""
        kind, step = parse_file_name(name)
        first = database.execute(
            "SELECT coalesce(max(line) + 1, 0) FROM trajectories WHERE run = ? AND kind = ? AND step = ?",
            (run, kind, step),
        ).fetchone()[0]
        lines = enumerate(iterate_lines(path, start), start=first)
        while chunk := list(islice(lines, CHUNK_LINES)):
            if name == "metrics.jsonl":
                damaged += self._insert_metrics(database, run, [text for _, (_, text) in chunk])
            elif name == "pool.jsonl":
                records = [make_pool_row(offset, text) for _, (offset, text) in chunk]
                database.executemany(INSERT_POOL_RECORD, [(run, *record) for record in records if record])
                damaged += records.count(None)
            else:
                rows = [make_trajectory_row(line, offset, text) for line, (offset, text) in chunk]
                place = (run, kind, step)
                database.executemany(INSERT_TRAJECTORY, [(*place, *row) for row in rows if row is not None])
                damaged += rows.count(None)
            _, (offset, text) = chunk[-1]
            start = offset + len(text)
        return start, damaged

    def _insert_metrics(self, database: sqlite3.Connection, run: int, lines: Sequence[bytes]) -> int:
        """Insert the metrics of the lines, and the warnings that they cause. Returns the number of damaged lines."""
        advisor, damaged = self._advisors.setdefault(run, MetricsAdvisor()), 0
        for text in lines:
            if (parsed := parse_metrics(text)) is None:
                damaged += 1
                continue
            step, values = parsed
            database.executemany(
                "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)",
                [(run, name, step, value) for name, value in values.items()],
            )
            warnings = [(run, step, warning) for warning in advisor.list_warnings(step, values, "")]
            database.executemany("INSERT INTO warnings VALUES (?, ?, ?)", warnings)
        return damaged

    def _forget_file(self, database: sqlite3.Connection, run: int, name: str) -> None:
        if name == "metrics.jsonl":
            self._advisors.pop(run, None)
            database.execute("DELETE FROM metrics WHERE run = ?", (run,))
            database.execute("DELETE FROM warnings WHERE run = ?", (run,))
        elif name == "pool.jsonl":
            database.execute("DELETE FROM pool WHERE run = ?", (run,))
        else:
            place = (run, *parse_file_name(name))
            database.execute("DELETE FROM trajectories WHERE run = ? AND kind = ? AND step = ?", place)


def read_num_changes(database: sqlite3.Connection, run: int) -> int:
    """Return how often the index of a run has changed, since it was made. Run 0: all runs."""
    row = database.execute("SELECT number FROM changes WHERE run = ?", (run,)).fetchone()
    return row["number"] if row else 0


def _count_change(database: sqlite3.Connection, run: int) -> None:
    query = "INSERT INTO changes VALUES (?, 1) ON CONFLICT (run) DO UPDATE SET number = number + 1"
    database.executemany(query, [(key,) for key in {0, run}])


def list_indexed_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the names and stats of the files of a run that the index reads, oldest iterations first."""
    for name in ("metrics.jsonl", "results.jsonl", "pool.jsonl"):
        with suppress(OSError):
            yield name, (folder / name).stat()
    names = []
    with suppress(OSError):
        names = sorted(name for name in os.listdir(folder / "rollouts") if ROLLOUT_FILE.fullmatch(name))
    for name in names:
        with suppress(OSError):
            yield f"rollouts/{name}", (folder / "rollouts" / name).stat()


def parse_metrics(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return the iteration and the metrics of a line of metrics.jsonl; None if the line is damaged."""
    try:
        record = _METRICS.decode(line)
        step = int(record.pop("step") or 0)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        return None
    if abs(step) > MAX_INT:
        return None
    return step, {name: value for name, value in record.items() if value is not None}


def make_trajectory_row(line: int, offset: int, text: bytes) -> tuple[object, ...] | None:
    """Return the columns of a trajectory from `line` on; None if its line is damaged."""
    try:
        one = _TRAJECTORIES.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    reward = None if one.reward is None else one.reward + sum(turn.reward or 0.0 for turn in one.turns)
    accuracy = None if reward is None else one.components.get("accuracy", reward)
    tokens = sum(turn.num_tokens for turn in one.turns)
    identity = (line, offset, len(text), one.prompt_id, one.sample, one.data_source)
    return (*identity, reward, accuracy, tokens, len(one.turns), one.outcome, one.end, one.stop_reason)


def make_pool_row(offset: int, text: bytes) -> tuple[object, ...] | None:
    """Return the columns of a record of an evolution from `kind` on: empty for a model call, which is not indexed; None
    if its line is damaged."""
    try:
        one = _POOL.decode(text)
        candidate = (one.key if one.kind == "candidate" else one.candidate) or ""
        problem = int(candidate.partition(".")[0].removeprefix("p") or 0) if one.problem is None else one.problem
        accuracy = (one.grade or {}).get("accuracy")
        is_right = None if accuracy is None else accuracy >= 1
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError):
        return None
    if one.kind == "call":
        return ()
    if abs(problem) > MAX_INT:
        return None
    votes = (one.votes_for, one.votes_against)
    return (one.kind, candidate, offset, len(text), problem, is_right, bool(one.failure), *votes)


def parse_file_name(name: str) -> tuple[str, int]:
    """Return the kind and the iteration of a file: `rollouts/val_000012.jsonl` -> ("val", 12)."""
    kind, _, number = Path(name).stem.rpartition("_")
    return (kind, int(number)) if number.isdigit() else (Path(name).stem, 0)


def make_file_name(kind: str, step: int) -> str:
    """Return the name of the file with the trajectories of an iteration."""
    return "results.jsonl" if kind == "results" else f"rollouts/{kind}_{step:06d}.jsonl"


def iterate_lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) for each complete line from the offset `start`."""
    if not path.is_file():  # opening a named pipe would wait forever
        raise OSError(f"{path} is not a file")
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n"):
                yield start, line
            start += len(line)
