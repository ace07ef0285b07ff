"""local_rag on a small corpus."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.plugins.search import index as search
from alphaapollo.tools import retrieval
from alphaapollo.tools.base import Session, ToolResult, ToolStatus, make_tools
from alphaapollo.tools.toolbox import ToolBox

CORPUS = {
    "sympy/solvers/ode.md": "# Differential equations\n\n`dsolve(eq, func)` solves a differential equation.\n",
    "sympy/matrices.rst": "Matrices\n========\n\nM.eigenvals() returns the eigenvalues with multiplicity.\n",
    "sympy/integrals.py": 'def integrate(f, x):\n    """Compute the definite or indefinite integral."""\n',
    "sympy/logo.png": "no document",
    "sympy/.git/config.txt": "hidden eigenvalues",
    "geometry/circles.txt": "The area of a circle of radius r is pi r squared. Größe: Fläche.\n",
    "geometry/empty.md": "\n\n",
}


@pytest.fixture(scope="module")
def index_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rag")
    for name, text in CORPUS.items():
        (folder / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "corpus" / name).write_text(text, encoding="utf-8")
    (folder / "corpus" / "sympy" / "latin.txt").write_bytes(b"\xff\xfe\xe4")
    report = search.build_index(folder / "corpus", folder / "index")
    assert report == {"geometry": (1, 0), "sympy": (3, 2)}
    return folder / "index"


@pytest.mark.parametrize(
    ("repo_name", "query", "path"),
    [
        ("sympy", "solve a differential equation", "solvers/ode.md"),
        ("sympy", "eigenvalues of a matrix", "matrices.rst"),
        ("sympy", "How do I compute the indefinite integral?", "integrals.py"),
        ("geometry", "fläche", "circles.txt"),
    ],
)
def test_best_passage(index_folder: Path, repo_name: str, query: str, path: str) -> None:
    hits = search.LocalRag(index_folder).query(repo_name, query, 3)
    assert hits[0][0].path == path
    assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)


def test_repositories_are_separate_and_queries_may_have_no_hits(index_folder: Path) -> None:
    index = search.LocalRag(index_folder)
    assert index.repo_names == ["geometry", "sympy"]
    assert index.query("geometry", "eigenvalues", 3) == []
    for query in ("", "the of and", "zzz", "!?"):
        assert index.query("sympy", query, 3) == []
    assert len(index.query("sympy", "eigenvalues integral differential", 20)) == 3
    assert len(index.query("sympy", "eigenvalues integral differential", 1)) == 1


def call(index: Path, arguments: str) -> ToolResult:
    return asyncio.run(ToolBox([search.LocalRag(str(index))], ToolLimits()).call("local_rag", arguments, Session()))


def test_tool_call(index_folder: Path) -> None:
    result = call(index_folder, '{"repo_name": "sympy", "query": "dsolve", "top_k": 3}')
    assert result.status is ToolStatus.OK and result.score is not None and result.score > 0
    assert result.text.startswith("[solvers/ode.md:1]\n# Differential equations\n\n`dsolve(eq, func)`")
    nothing = call(index_folder, '{"repo_name": "sympy", "query": "zebra"}')
    assert (nothing.text, nothing.score) == ("no passage of sympy has a word of the query.", 0.0)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ('{"repo_name": "simpy", "query": "x"}', "error", r"'simpy'.*'sympy'\?.* geometry, sympy\."),
        ('{"repo_name": "sympy", "query": "x", "top_k": 0}', "refused", "argument 'top_k': 0 "),
        ('{"repo_name": "sympy", "query": "x", "top_k": 1e9}', "refused", "argument 'top_k'"),
    ],
)
def test_invalid_calls(index_folder: Path, arguments: str, status: str, text: str) -> None:
    result = call(index_folder, arguments)
    assert result.status == status and re.search(text, result.text)


def test_error_for_a_missing_index_has_the_command(tmp_path: Path) -> None:
    """Also for the index of an earlier version, which has no passages in bm25s's corpus file."""
    (tmp_path / "0000").mkdir()
    (tmp_path / "0000/params.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no index of documents.*tools\.retrieval build "):
        make_tools(["local_rag"], {"local_rag": {"index": str(tmp_path)}})


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("Bananas are yellow.")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["retrieval", *arguments])
        return retrieval.main(), *capsys.readouterr()

    out = str(tmp_path / "index")
    for _ in range(2):  # the second replaces the first
        assert run("build", str(tmp_path / "notes"), "--out", out) == (0, "notes: 1 passages; 0 files skipped\n", "")
    assert run("query", out, "notes", "yellow") == (0, "[a.md:1]\nBananas are yellow.\n", "")
    code, _, error = run("query", str(tmp_path / "none"), "notes", "yellow")
    assert code == 2 and error.startswith("error: no index of documents at")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "notes"]


@pytest.mark.parametrize(
    ("docs", "out", "fact"),
    [
        ("none", "out", "none is not a folder"),
        ("pdf", "out", r"no documents .*; 1 other files"),
        ("text", "text", "not an index"),
        ("text", "text/a.md/out", "cannot be written"),
    ],
)
def test_invalid_arguments_of_build(tmp_path: Path, docs: str, out: str, fact: str) -> None:
    for name in ("pdf/a.pdf", "text/a.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=fact):
        search.build_index(tmp_path / docs, tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pdf", "text"]


def test_lines_of_a_jsonl_file_are_passages(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text(
        '{"id": "0", "contents": "Apples\\nred"}\n{"id": "1", "contents": "Bananas\\nyellow"}\n'
    )
    assert search.build_index(folder, tmp_path / "index") == {"corpus": (2, 0)}
    result = call(tmp_path / "index", '{"query": "yellow"}')  # the only repository needs no name
    assert (result.status, result.text) == (ToolStatus.OK, "[a.jsonl:2]\nBananas\nyellow")
    (folder / "a.jsonl").write_text('{"contents": "Apples"}\n{"text": "Bananas"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not a passage\. Write"):
        search.build_index(folder, tmp_path / "index")
