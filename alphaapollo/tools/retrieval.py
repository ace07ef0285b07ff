"""The tool `local_rag`: finds passages in local documents by their words (BM25), and the command that makes its index.

    python -m alphaapollo.tools.retrieval build FOLDER --out INDEX      each subfolder of FOLDER is one `repo_name`
    python -m alphaapollo.tools.retrieval query INDEX REPO_NAME "words to look for"

Documents are Markdown, reStructuredText, plain text and Python files. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alphaapollo.tools.base import Session, ToolFailedError, ToolResult, ToolStatus, tools
from alphaapollo.tools.documents import Passage, read_folder, words_of
from alphaapollo.utils.registry import nearest

MANIFEST = "index.json"
FORMAT = 1
MAX_TOP_K = 20


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage and how well it fits (BM25; 0 = no word in common)."""

    passage: Passage
    score: float


class Index:
    """Passages of several repositories, searched by words. Each is read from disk at its first query.

    ValueError: there is no index at `folder`, with the command that makes one.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder).expanduser()
        try:
            manifest = json.loads((self._folder / MANIFEST).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"no index of documents at {folder} ({error.strerror}). Make one from a folder with one subfolder a "
                f"repo_name: python -m alphaapollo.tools.retrieval build FOLDER --out {folder}"
            ) from error
        except ValueError:
            manifest = {}  # broken: the format says so
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError(
                f"the index at {folder} is broken, or not of format {FORMAT}. Make it again: "
                f"python -m alphaapollo.tools.retrieval build FOLDER --out {folder}"
            )
        self._places: dict[str, str] = manifest["repositories"]
        self._loaded: dict[str, tuple[Any, list[Passage]]] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return sorted(self._places)

    def query(self, repo_name: str, query: str, top_k: int) -> list[Hit]:
        """The best passages first; none if no word of the query occurs. `repo_name` must be one of `names`."""
        with self._lock:
            if repo_name not in self._loaded:
                self._loaded[repo_name] = self._load(repo_name)
        ranking, passages = self._loaded[repo_name]
        known = [word for word in words_of(query) if word in ranking.vocab_dict]
        if not known:
            return []
        found, scores = ranking.retrieve([known], k=min(top_k, len(passages)), show_progress=False, n_threads=0)
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [Hit(passages[position], score) for position, score in pairs if score > 0]

    def _load(self, repo_name: str) -> tuple[Any, list[Passage]]:
        import bm25s

        folder = self._folder / self._places[repo_name]
        lines = (folder / "passages.jsonl").read_bytes().splitlines()
        return bm25s.BM25.load(str(folder), show_progress=False), [Passage(**json.loads(line)) for line in lines]


def build(source: str | Path, out: str | Path) -> dict[str, tuple[int, dict[str, int]]]:
    """Make the index at `out` of the documents in `source`, in place of one that is there.

    Each subfolder is a repository; without subfolders the folder itself is one. Returns for each the number of
    passages, and of files left out by reason.

    ValueError: `source` is no folder or has no documents, or `out` is no index or cannot be written.
    """
    import bm25s

    source, out = Path(source).expanduser().resolve(), Path(out).expanduser()
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder of documents.")
    if out.exists() and not (out / MANIFEST).is_file():
        raise ValueError(f"{out}: exists and is not an index; give another place with --out.")
    subfolders = [path for path in sorted(source.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    report: dict[str, tuple[int, dict[str, int]]] = {}
    places: dict[str, str] = {}
    try:
        for number, folder in enumerate(subfolders or [source]):
            passages, left_out = read_folder(folder)
            report[folder.name] = (len(passages), left_out)
            if not passages:
                continue
            place = partial / f"{number:04d}"
            place.mkdir(parents=True)
            ranking = bm25s.BM25()
            # A word that no passage has: bm25s cannot index a corpus without words.
            ranking.index([words_of(f"{one.path} {one.text}") or ["\0"] for one in passages], show_progress=False)
            ranking.save(str(place), show_progress=False)
            lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in passages)
            (place / "passages.jsonl").write_text(lines, encoding="utf-8")
            places[folder.name] = place.name
        if not places:
            raise ValueError(f"{source}: no documents in it ({_reasons(report)}).")
        (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "repositories": places}, indent=1))
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except OSError as error:
        raise ValueError(f"{out}: the index cannot be made ({error}).") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


@tools.register("local_rag")
class LocalRag:
    """Passages of local documents that fit a query.

    Args:
        index: folder of an index that `python -m alphaapollo.tools.retrieval build` has made (ValueError: none there).
    """

    name = "local_rag"
    text_argument: str | None = None

    def __init__(self, index: str = ""):
        if not index:
            raise ValueError(
                "the tool local_rag needs an index: set env.tool_settings.local_rag.index=INDEX. Make one from a "
                "folder with one subfolder a repo_name: python -m alphaapollo.tools.retrieval build FOLDER --out INDEX"
            )
        self._index = Index(index)
        names = self._index.names
        self.description = (
            "Search the documentation and source of a library by words; returns the best passages. "
            f"Available: {', '.join(names)}."
        )
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": {
                "repo_name": {
                    "type": "string",
                    "description": f"Which one: {', '.join(names)}.",
                    "examples": names[:1],
                },
                "query": {"type": "string", "description": "Words to look for.", "minLength": 1},
                "top_k": {
                    "type": "integer",
                    "description": "How many passages.",
                    "default": 3,
                    "minimum": 1,
                    "maximum": MAX_TOP_K,
                },
            },
            "required": ["repo_name", "query"],
            "additionalProperties": False,
        }

    async def call(self, arguments: dict[str, Any], session: Session) -> ToolResult:
        repo_name, query = arguments["repo_name"], arguments["query"]
        if repo_name not in self._index.names:
            near = nearest(repo_name[:100], self._index.names, count=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(self._index.names)
            return ToolResult(f"no repo_name {repo_name[:100]!r}.{hint} Known: {known}.", ToolStatus.ERROR)
        try:
            hits = await asyncio.to_thread(self._index.query, repo_name, query, int(arguments.get("top_k", 3)))
        except OSError as error:
            raise ToolFailedError(f"{self.name}: the index cannot be read: {error}") from error
        if not hits:
            return ToolResult(f"no passage of {repo_name} has a word of the query.", ToolStatus.OK, score=0.0)
        return ToolResult(shown(hits), ToolStatus.OK, score=hits[0].score)

    async def close(self) -> None:
        return None


def shown(hits: list[Hit]) -> str:
    """Passages as a model or a person reads them, the best first."""
    return "\n\n".join(f"[{hit.passage.path}:{hit.passage.line}]\n{hit.passage.text}" for hit in hits)


def _reasons(report: dict[str, tuple[int, dict[str, int]]]) -> str:
    counts = [f"{count} files {reason}" for _, left_out in report.values() for reason, count in left_out.items()]
    return "; ".join(counts) or "no files"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="make an index of a folder of documents")
    making.add_argument("folder")
    making.add_argument("--out", required=True, help="folder to make")
    asking = commands.add_parser("query", help="search an index")
    asking.add_argument("index")
    asking.add_argument("repo_name")
    asking.add_argument("query")
    asking.add_argument("--top-k", type=int, default=3)
    options = parser.parse_args()
    if options.command == "query" and options.top_k < 1:
        parser.error("--top-k must be at least 1")
    try:
        if options.command == "build":
            for name, (number, left_out) in build(options.folder, options.out).items():
                notes = [f"{count} files left out ({reason})" for reason, count in left_out.items()]
                print("; ".join([f"{name}: {number} passages", *notes]))
            return 0
        index = Index(options.index)
        if options.repo_name not in index.names:
            raise ValueError(f"no repo_name {options.repo_name!r}. Known: {', '.join(index.names)}.")
        print(shown(index.query(options.repo_name, options.query, options.top_k)) or "nothing found")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
