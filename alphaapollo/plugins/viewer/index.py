"""Index of run folders in SQLite: metrics, and the position of every trajectory and of every record of a pool.

files that a run appends to -> read from the cursor to the last complete line -> rows of the index, and texts.py

The index is a temporary file: reading 100,000 trajectories takes seconds. A file that was replaced, e.g. by a resumed
run, is read again. Damaged lines are counted and skipped; a file that cannot be read is skipped until it changes.
The notes are a file of their own that is kept: numbers of runs (in addresses of pages), tags, notes and hidden runs.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from alphaapollo.observability.advice import MetricsAdvisor
from alphaapollo.plugins.viewer.run_folders import find_runs
from alphaapollo.plugins.viewer.texts import TextWriter, list_message_texts
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.types import DERIVED, Score
from alphaapollo.utils.disk import open_regular
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.redaction import replace_surrogates

POLL_SECONDS = 1.0
SCHEMA = """
CREATE TABLE runs (id INTEGER PRIMARY KEY, path TEXT UNIQUE);
CREATE TABLE files (run INT, name TEXT, inode INT, offset INT, damaged INT, mtime INT, ctime INT,
    error TEXT, PRIMARY KEY (run, name)) WITHOUT ROWID;
CREATE TABLE metrics (run INT, name TEXT, step INT, value REAL, PRIMARY KEY (run, name, step)) WITHOUT ROWID;
CREATE TABLE warnings (run INT, step INT, text TEXT);
CREATE TABLE trajectories (run INT, kind TEXT, step INT, line INT, offset INT, bytes INT, prompt_id INT, sample INT,
    data_source TEXT, reward REAL, accuracy REAL, tokens INT, turns INT, outcome TEXT, end TEXT, stop_reason TEXT,
    failure TEXT, question INT, PRIMARY KEY (run, kind, step, line)) WITHOUT ROWID;
CREATE INDEX prompts ON trajectories (run, question, step);
CREATE TABLE texts (run INT, kind TEXT, step INT, line INT, offset INT, bytes INT, PRIMARY KEY (run, kind, step, line))
    WITHOUT ROWID;
CREATE TABLE choices (run INT, name TEXT, value TEXT, PRIMARY KEY (run, name, value)) WITHOUT ROWID;
CREATE TABLE pool (run INT, kind TEXT, candidate TEXT, offset INT, bytes INT, problem INT, is_right INT, failed INT,
    votes_for INT, votes_against INT, PRIMARY KEY (run, kind, candidate, offset)) WITHOUT ROWID;
CREATE INDEX problems ON pool (run, problem);
"""
# A file whose statement differs is not used.
NOTES = """CREATE TABLE notes (id INTEGER PRIMARY KEY, path TEXT UNIQUE,
    tags TEXT NOT NULL DEFAULT '', note TEXT NOT NULL DEFAULT '', hidden INT NOT NULL DEFAULT 0)"""
ROLLOUT_FILE = re.compile(r"[a-z_]+_[0-9]{6,18}\.jsonl")
MAX_LINE = 256 << 20  # bytes
MAX_INT = 2**63 - 1  # of SQLite
Integer = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
DATA_TABLES = ("metrics", "warnings", "trajectories", "texts", "choices", "pool")
CHOICES = ("outcome", "end", "stop_reason", "data_source")  # columns whose distinct values are kept
TABLES = {"metrics": ("metrics", 4), "pool": ("pool", 10)}  # kind of file -> table and number of its columns
DAMAGED = (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError)  # raised for a damaged line
KIND_NAMES = {"step": "training", "val": "validation", "val_greedy": "validation, greedy", "results": "evaluation"}


class _Turn(msgspec.Struct):
    observation: Any = None
    reward: float | None = None
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**40)] = 0


class LoggedTrajectory(msgspec.Struct):
    """Fields of a line of the rollout log that the index needs. The others are not parsed."""

    prompt_id: Integer
    sample: Integer
    data_source: str
    reward: float | None
    components: dict[str, Any]
    outcome: str
    end: str
    stop_reason: str | None
    turns: list[_Turn]
    accuracy: float | None = DERIVED  # older runs have none
    text: str = ""
    reason: str = ""
    prompt: msgspec.Raw = msgspec.Raw()
    ground_truth: msgspec.Raw = msgspec.Raw()
    prompt_digest: str = ""  # empty in files of earlier versions


class _PoolRecord(msgspec.Struct):
    """Fields of a line of pool.jsonl that the index needs."""

    kind: str
    key: str = ""
    candidate: str | None = ""
    grade: JsonObject | None = None
    failure: str = ""
    votes_for: Integer | None = None
    votes_against: Integer | None = None


_POOL = msgspec.json.Decoder(_PoolRecord)
_METRICS = msgspec.json.Decoder(dict[str, float | None])
parse_trajectory = msgspec.json.Decoder(LoggedTrajectory).decode
"""Parse a line of the rollout log. Raises one of DAMAGED for a damaged line."""


class RunIndex:
    """Index of all runs in a folder. One thread updates it; each request reads it through a connection of its own.

    `problem` is why the last update failed, or empty. `notes_problem` is why notes cannot be changed, or empty.
    """

    def __init__(self, root: Path, path: Path, folders: Sequence[Path] | None = None, notes: Path | None = None):
        """root: folder whose runs are indexed. path: of the index. folders: only these runs in `root`. notes: file with
        numbers and notes of runs; None: temporary, like the index."""
        self.root, self.path, self.problem, self._folders = root, path, "", folders
        temporary, self.texts = path.with_suffix(".notes"), path.with_suffix(".texts")
        self.notes_problem = prepare_notes(notes or temporary)
        self.notes = temporary if self.notes_problem else notes or temporary
        prepare_notes(self.notes)
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
        database.execute("ATTACH ? AS own", (str(self.notes),))
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
        paths = [str(folder) for folder in self._folders or find_runs(self.root)]
        current_paths = {path for path in paths if replace_surrogates(path) == path}  # SQLite needs UTF-8
        with database:
            database.execute("BEGIN IMMEDIATE")  # two viewers may share the index
            run_ids = {row["path"]: row["id"] for row in database.execute("SELECT id, path FROM runs")}
            for path in run_ids.keys() - current_paths:
                for table, column in (("runs", "id"), *((name, "run") for name in ("files", *DATA_TABLES))):
                    database.execute(f"DELETE FROM {table} WHERE {column} = ?", (run_ids[path],))
            for path in sorted(current_paths - run_ids.keys()):
                database.execute("INSERT OR IGNORE INTO own.notes (path) VALUES (?)", (path,))
                database.execute("INSERT INTO runs SELECT id, path FROM own.notes WHERE path = ?", (path,))
                run_ids[path] = database.execute("SELECT id FROM runs WHERE path = ?", (path,)).fetchone()["id"]
        failure: Exception | None = None
        for path in sorted(current_paths):
            if self._stop.is_set():
                return
            try:
                with suppress(ValueError):  # of another format; pages show it
                    check_format(Path(path))
                    self._update_run(database, run_ids[path], Path(path))
            except sqlite3.DatabaseError:  # the index has failed, not the run
                raise
            except Exception as error:  # noqa: BLE001  after the other runs
                failure = error
        if failure:
            raise failure

    def _update_run(self, database: sqlite3.Connection, run: int, folder: Path) -> None:
        of_run = "SELECT * FROM files WHERE run = ?"
        states = {row["name"]: row for row in database.execute(of_run, (run,))}
        save = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        for name, stat in list_indexed_files(folder):
            identity = (run, name, stat.st_ino & MAX_INT)
            times = (stat.st_mtime_ns & MAX_INT, stat.st_ctime_ns & MAX_INT)
            state, indexed = states.get(name), (identity[2], times[1])
            if state is not None and (state["inode"], state["ctime"]) == indexed:
                continue
            try:
                with database:
                    database.execute("BEGIN IMMEDIATE")  # two viewers may share the index
                    state = database.execute(f"{of_run} AND name = ?", (run, name)).fetchone()
                    if state is not None and (state["inode"], state["ctime"]) == indexed:
                        continue
                    start, damaged = 0, 0
                    if state is not None and state["inode"] == identity[2] and state["offset"] <= stat.st_size:
                        start, damaged = state["offset"], state["damaged"]
                    elif state is not None:
                        self._forget_file(database, run, name)
                    progress = self._read_lines(database, run, folder / name, name, start, damaged)
                    database.execute(save, (*identity, *progress, *times, ""))
            except sqlite3.DatabaseError:  # the index has failed, not the file
                raise
            except Exception as error:  # noqa: BLE001  one bad file must not hide the others
                with database:
                    self._forget_file(database, run, name)
                    database.execute(save, (*identity, 0, 0, *times, f"{type(error).__name__}: {error}"))

    def _read_lines(
        self, database: sqlite3.Connection, run: int, path: Path, name: str, start: int, damaged: int
    ) -> tuple[int, int]:
        """Index the lines of a file from the offset `start`. Returns the offset after the last complete line, and the
        number of damaged lines."""
        kind, step = parse_file_name(name)
        first = "SELECT coalesce(max(line) + 1, 0) FROM trajectories WHERE run = ? AND kind = ? AND step = ?"
        lines = enumerate(iterate_lines(path, start), start=database.execute(first, (run, kind, step)).fetchone()[0])
        advisor, warnings = self._advisors.setdefault(run, MetricsAdvisor()), list[tuple[int, int, str]]()
        texts, choices = TextWriter(self.texts, database, (run, kind, step)), set[tuple[int, str, object]]()

        def make_rows(line: int, offset: int, text: bytes) -> list[tuple[object, ...]]:
            if kind == "metrics":
                number, values = parse_metrics(text)
                warnings.extend((run, number, warning) for warning in advisor.list_warnings(number, values))
                return [(run, metric, number, value) for metric, value in values.items()]
            if kind == "pool":
                return [(run, *row) for row in make_pool_rows(offset, text)]
            trajectory = parse_trajectory(text)
            texts.add(line, list_texts(trajectory))
            choices.update((run, name, getattr(trajectory, name)) for name in CHOICES if getattr(trajectory, name))
            return [(run, kind, step, *make_trajectory_row(line, offset, len(text), trajectory))]

        def read_rows() -> Iterator[tuple[object, ...]]:
            nonlocal start, damaged
            for line, (offset, text) in lines:
                start = offset + len(text)
                try:
                    yield from make_rows(line, offset, text)
                except DAMAGED:
                    damaged += 1

        table, columns = TABLES.get(kind, ("trajectories", 18))
        database.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * columns)})", read_rows())
        texts.flush()
        database.executemany("INSERT INTO warnings VALUES (?, ?, ?)", warnings)
        database.executemany("INSERT OR IGNORE INTO choices VALUES (?, ?, ?)", choices)
        return start, damaged

    def _forget_file(self, database: sqlite3.Connection, run: int, name: str) -> None:
        if name == "metrics.jsonl":
            self._advisors.pop(run, None)
        of_run = {"metrics.jsonl": ("metrics", "warnings"), "pool.jsonl": ("pool",)}.get(name)
        where, place = ("", ()) if of_run else (" AND kind = ? AND step = ?", parse_file_name(name))
        for table in of_run or ("trajectories", "texts"):
            database.execute(f"DELETE FROM {table} WHERE run = ?{where}", (run, *place))


def prepare_notes(path: Path) -> str:
    """Make the file of notes unless it exists. Returns why it cannot be used, or an empty text."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is a pipe, a device or a folder")
        with closing(sqlite3.connect(path, timeout=30)) as database, database:
            database.execute("BEGIN IMMEDIATE")  # another viewer may make it; an error if it cannot be written
            tables = database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
            if not tables:
                database.execute(NOTES)
            elif tables != [(NOTES,)]:
                raise OSError("it was made by another version or program")
    except (OSError, sqlite3.Error) as error:
        return f"Notes are not kept and cannot be changed: {path} cannot be used ({error}). Move it away"
    return ""


def read_version(database: sqlite3.Connection, run: int) -> tuple[int, ...]:
    """Return numbers that change when the index of a run changes. Run 0: all runs."""
    query = "SELECT (SELECT count(*) FROM runs), count(*), total(offset), max(ctime) FROM files WHERE ? IN (0, run)"
    return tuple(database.execute(query, (run,)).fetchone())


def list_indexed_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the names and stats of the files of a run that the index reads, oldest iterations first."""
    names = ["metrics.jsonl", "results.jsonl", "pool.jsonl"]
    with suppress(OSError):
        file_names = [] if (folder / "rollouts").is_symlink() else os.listdir(folder / "rollouts")
        names += sorted(f"rollouts/{name}" for name in file_names if ROLLOUT_FILE.fullmatch(name))
    for name in names:
        with suppress(OSError):
            yield name, (folder / name).stat()


def parse_metrics(line: bytes) -> tuple[int, dict[str, float]]:
    """Return the iteration and the metrics of a line of metrics.jsonl. Raises one of DAMAGED for a damaged line."""
    record = _METRICS.decode(line)
    step = msgspec.convert(int(record.pop("step") or 0), Integer)
    return step, {name: value for name, value in record.items() if value is not None}


def list_texts(trajectory: LoggedTrajectory) -> Iterator[str]:
    """Yield the texts of a trajectory: prompt, answers, and what the environment replied."""
    yield from list_message_texts(msgspec.json.decode(trajectory.prompt) if bytes(trajectory.prompt) else "")
    yield trajectory.text
    for turn in trajectory.turns:
        yield from list_message_texts(turn.observation)


def make_trajectory_row(line: int, offset: int, size: int, trajectory: LoggedTrajectory) -> tuple[object, ...]:
    """Return the columns of a trajectory from `line` on."""
    reward = (
        None if trajectory.reward is None else trajectory.reward + sum(turn.reward or 0.0 for turn in trajectory.turns)
    )
    accuracy = None if reward is None else Score(reward, trajectory.components, accuracy=trajectory.accuracy).accuracy
    tokens = sum(turn.num_tokens for turn in trajectory.turns)
    identity = (line, offset, size, trajectory.prompt_id, trajectory.sample, trajectory.data_source)
    failure = trajectory.reason[:200] if reward is None else ""
    # The first observation, too: an environment may derive its seed from the position of a row.
    content = b"\n".join(map(bytes, (trajectory.prompt, trajectory.ground_truth, trajectory.prompt_digest.encode())))
    question = hashlib.blake2b(content, digest_size=7).digest()
    ends = (trajectory.outcome, trajectory.end, trajectory.stop_reason, failure, int.from_bytes(question))
    return (*identity, reward, accuracy, tokens, len(trajectory.turns), *ends)


def make_pool_rows(offset: int, text: bytes) -> list[tuple[object, ...]]:
    """Return the columns of a record of an evolution from `kind` on; no row for other records, e.g. a model call.
    Raises one of DAMAGED for a damaged line."""
    record = _POOL.decode(text)
    if record.kind not in ("candidate", "judgement"):
        return []
    candidate = (record.key if record.kind == "candidate" else record.candidate) or ""
    problem = msgspec.convert(int(candidate.partition(".")[0].removeprefix("p")), Integer)
    accuracy = (record.grade or {}).get("accuracy")
    is_right = None if accuracy is None else accuracy >= 1
    votes = (record.votes_for, record.votes_against)
    return [(record.kind, candidate, offset, len(text), problem, is_right, bool(record.failure), *votes)]


def parse_file_name(name: str) -> tuple[str, int]:
    """Return the kind and the iteration of a file: `rollouts/val_000012.jsonl` -> ("val", 12)."""
    kind, _, number = Path(name).stem.rpartition("_")
    return (kind, int(number)) if number.isdigit() else (Path(name).stem, 0)


def make_file_name(kind: str, step: int) -> str:
    """Return the name of the file with the trajectories of an iteration."""
    return "results.jsonl" if kind == "results" else f"rollouts/{kind}_{step:06d}.jsonl"


def iterate_lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) for each complete line from the offset `start`."""
    with open_regular(path) as file:
        file.seek(start)
        while line := file.readline(MAX_LINE):
            if line.endswith(b"\n"):
                yield start, line
            elif len(line) == MAX_LINE:
                raise OSError(f"{path} has a line of more than {MAX_LINE >> 20} MiB")
            start += len(line)
