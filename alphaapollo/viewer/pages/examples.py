"""Page of a fine-tuning run: the first examples that it trains on, with the trained tokens marked."""

from __future__ import annotations

from alphaapollo.observability.example_log import LoggedExample, read_examples
from alphaapollo.viewer.pages.query import Query
from alphaapollo.viewer.samples import compare_texts

EXAMPLES_ON_A_PAGE = 8


def list_examples(query: Query) -> dict[str, object]:
    """Values of a page of examples. A pair also has the differences of its responses, word by word."""
    run, page = query.find_run(), max(int(query.options.get("page") or 0), 0)
    examples = read_examples(run.folder)
    first = page * EXAMPLES_ON_A_PAGE
    shown = examples[first : first + EXAMPLES_ON_A_PAGE]
    return {
        "run": run,
        "first": first,
        "num_examples": len(examples),
        "examples": [(one, compare_pair(one) if len(one.rows) == 2 else None) for one in shown],
        "table": {"page": page, "last_page": max(len(examples) - 1, 0) // EXAMPLES_ON_A_PAGE, "options": query.options},
    }


def compare_pair(pair: LoggedExample) -> tuple[str, list[tuple[str, str]]]:
    """Return the common prompt of a pair, and the difference of its responses as parts (kind, text)."""
    chosen, rejected = (row.parts for row in pair.rows)
    shared = chosen[0][2] if len(chosen) > 1 and chosen[0] == rejected[0] else ""
    texts = ("".join(text for _, _, text in parts).removeprefix(shared) for parts in (rejected, chosen))
    return shared, compare_texts(*texts)
