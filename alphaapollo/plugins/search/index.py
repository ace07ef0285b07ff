"""Tool `local_rag`, which searches local documents with BM25, and the command that builds its index.

    python -m alphaapollo.tools.retrieval build FOLDER --out INDEX      each subfolder of FOLDER is one `repo_name`
    python -m alphaapollo.tools.retrieval query INDEX REPO_NAME "words to look for"

Documents are Markdown, reStructuredText, plain text, Python and jsonl files. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alphaapollo.tools.base import Session, Tool, ToolResult, ToolStatus
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.registry import suggest_similar

PASSAGE_FILE = ".jsonl"  # one passage per line: {"contents": ...}, as in the corpora of Search-R1
SUFFIXES = (".md", ".markdown", ".rst", ".txt", ".py", ".pyi", PASSAGE_FILE)
PASSAGE_CHARACTERS = 1500
STOP_WORDS = "english_plus"  # NLTK's, see bm25s
INDEX_FILE, CORPUS_FILE = "*/params.index.json", "*/corpus.jsonl"  # that bm25s writes for each repository
MAX_TOP_K = 20
BUILD = "python -m alphaapollo.tools.retrieval build FOLDER --out"


@dataclass(frozen=True, slots=True)
class Passage:
    """Part of a document, e.g. `Passage("solvers/ode.md", 12, "dsolve(eq, func) solves ...")`."""

    path: str  # relative to the repository's folder
    line: int  # line number of its first line, starting at 1
    text: str


def split_passages(path: str, text: str) -> Iterator[Passage]:
    """Split a document into passages of up to PASSAGE_CHARACTERS: join short paragraphs, split long paragraphs between
    lines. A longer line is a passage; what it has beyond 4 * PASSAGE_CHARACTERS is left out."""
    blocks, size = [(1, list[str]())], 0  # (number of the first line, lines)
    for number, line in enumerate(text.splitlines(), start=1):
        is_full = size + len(line) > PASSAGE_CHARACTERS
        if blocks[-1][1] and (is_full or (not line.strip() and size > PASSAGE_CHARACTERS // 2)):
            blocks.append((number, []))
            size = 0
        blocks[-1][1].append(line[: 4 * PASSAGE_CHARACTERS])
        size += len(line) + 1
    for first, lines in blocks:
        filled = [index for index, line in enumerate(lines) if line.strip()]
        if filled:
            yield Passage(path, first + filled[0], "\n".join(lines).strip("\n"))


def read_passages(folder: Path) -> tuple[list[Passage], int]:
    """Return the passages of all documents below a folder, and the number of files that were skipped, because they have
    another suffix than SUFFIXES or are not UTF-8."""
    passages, num_skipped = list[Passage](), 0
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder)
        if not file.is_file() or any(part.startswith(".") for part in path.parts):
            continue
        if file.suffix.lower() == PASSAGE_FILE:
            passages += _read_passage_lines(path.as_posix(), file)
        elif (text := _read_text(file)) is None:
            num_skipped += 1
        else:
            passages += split_passages(path.as_posix(), text)
    return passages, num_skipped


def _read_text(file: Path) -> str | None:
    with suppress(UnicodeDecodeError):
        return file.read_text(encoding="utf-8") if file.suffix.lower() in SUFFIXES else None
    return None


def _read_passage_lines(path: str, file: Path) -> Iterator[Passage]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield Passage(path, number, str(json.loads(line)["contents"]))
            except (ValueError, KeyError, TypeError) as error:
                fix = 'Write {"contents": "text"} on each line.'
                raise ValueError(f"{file}:{number}: not a passage. {fix}") from error


def build_index(source: str | Path, out: str | Path) -> dict[str, tuple[int, int]]:
    """Build a search index of the documents in the folder `source` and write it to the folder `out`, replacing an
    existing index.

    Each subfolder of `source` is a repository; without subfolders, `source` is the only repository. Returns
    {repository: (number of passages, number of skipped files)}.

    Raises ValueError if `source` has no documents, or if `out` cannot be written or exists and is not an index.
    """
    source, out = Path(source).expanduser().resolve(), Path(out).expanduser()
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder. Choose a folder of documents.")
    if out.exists() and not any(out.glob(INDEX_FILE)):
        raise ValueError(f"{out} exists, but is not an index. Choose another folder with --out.")
    subfolders = [path for path in sorted(source.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    report: dict[str, tuple[int, int]] = {}
    try:
        for folder in subfolders or [source]:
            passages, num_skipped = read_passages(folder)
            report[folder.name] = (len(passages), num_skipped)
            if passages:
                _write_passage_index(partial / folder.name, passages)
        if not partial.exists():
            skipped = sum(num_skipped for _, num_skipped in report.values())
            raise ValueError(f"{source} has no documents ({' '.join(SUFFIXES)}); {skipped} other files were skipped.")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except OSError as error:
        raise ValueError(f"the index {out} cannot be written ({error}). Choose another folder with --out.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _write_passage_index(folder: Path, passages: list[Passage]) -> None:
    """Write the passages of one repository (subfolder of documents) and their BM25 index to a new folder."""
    import bm25s

    ranking = bm25s.BM25()
    texts = [f"{passage.path} {passage.text}" for passage in passages]
    # allow_empty=False: a text without words gets an empty word, because bm25s cannot index a corpus without words
    words = bm25s.tokenize(texts, stopwords=STOP_WORDS, allow_empty=False, show_progress=False)
    ranking.index(words, show_progress=False)
    ranking.save(str(folder), corpus=[asdict(passage) for passage in passages], show_progress=False)


class LocalRag(Tool):
    """Tool that returns the passages of local documents that match a query best. `index`: folder written by `python -m
    alphaapollo.tools.retrieval build`. Raises ValueError if it has no index."""

    name = "local_rag"

    def __init__(self, index: str | Path):
        self._folder = Path(index).expanduser()
        self.repo_names = names = sorted(file.parent.name for file in self._folder.glob(CORPUS_FILE))
        if not names:
            raise ValueError(
                f"no index of documents at {index}. Build it: {BUILD} {index} (FOLDER: a folder with one subfolder of "
                "documents per repository)"
            )
        self._rankings: dict[str, Any] = {}  # each repository, after its first query
        self._lock = threading.Lock()
        available = ", ".join(names)
        self.description = f"Search documents by words; returns the best passages. Available: {available}."
        choice = {"default": names[0]} if len(names) == 1 else {"examples": names[:1]}
        count = {"type": "integer", "description": "How many passages.", "default": 3, "minimum": 1}
        self.parameters: JsonObject = {
            "type": "object",
            "properties": {
                "repo_name": {"type": "string", "description": f"Which one: {available}.", **choice},
                "query": {"type": "string", "description": "Words to look for.", "minLength": 1},
                "top_k": {**count, "maximum": MAX_TOP_K},
            },
            "required": ["query"] if len(names) == 1 else ["repo_name", "query"],
            "additionalProperties": False,
        }

    def query(self, repo_name: str, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """Return the `top_k` best passages of a repository (subfolder) with BM25 scores above 0, best first."""
        import bm25s

        with self._lock:
            if repo_name not in self._rankings:
                folder = str(self._folder / repo_name)
                self._rankings[repo_name] = bm25s.BM25.load(folder, load_corpus=True, show_progress=False)
        ranking = self._rankings[repo_name]
        words = bm25s.tokenize(query, stopwords=STOP_WORDS, return_ids=False, show_progress=False)
        count = min(top_k, len(ranking.corpus))
        passages, scores = ranking.retrieve(words, k=count, show_progress=False)
        pairs = zip(passages[0].tolist(), scores[0].tolist(), strict=True)
        return [(Passage(**passage), score) for passage, score in pairs if score > 0]

    async def call(self, arguments: JsonObject, session: Session) -> ToolResult:
        names = self.repo_names
        repo_name = arguments.get("repo_name", names[0])
        if repo_name not in names:
            hint = suggest_similar(repo_name, names)
            return ToolResult(f"no repo_name {repo_name[:100]!r}.{hint} Known: {', '.join(names)}.", ToolStatus.ERROR)
        hits = await asyncio.to_thread(self.query, repo_name, arguments["query"], int(arguments.get("top_k", 3)))
        if not hits:
            return ToolResult(f"no passage of {repo_name} has a word of the query.", ToolStatus.OK, score=0.0)
        text = "\n\n".join(f"[{passage.path}:{passage.line}]\n{passage.text}" for passage, _ in hits)
        return ToolResult(text, ToolStatus.OK, score=hits[0][1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build an index of a folder of documents")
    build.add_argument("folder")
    build.add_argument("--out", required=True, help="folder of the new index")
    query = commands.add_parser("query", help="search an index")
    query.add_argument("index")
    query.add_argument("repo_name")
    query.add_argument("query")
    query.add_argument("--top-k", type=int, default=3)
    options = parser.parse_args(argv)
    try:
        if options.command == "build":
            for name, (number, num_skipped) in build_index(options.folder, options.out).items():
                print(f"{name}: {number} passages; {num_skipped} files skipped")
            return 0
        arguments = {"repo_name": options.repo_name, "query": options.query, "top_k": options.top_k}
        print(asyncio.run(LocalRag(options.index).call(arguments, Session())).text)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
