"""Print the tests that a change needs, from the paths of changed files on standard input.

    git diff --name-only main... | python -m scripts.changed_tests

Pages need the commands of pages, and plug-ins their own tests. For any other file, nothing is printed: `make test` then
runs the core tests. The workflow of pull requests uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

PAGES = "tests/loop/test_documentation.py"


def choose_tests(changed: Iterable[str]) -> list[str]:
    """Folders and files of tests; empty if the core tests are needed."""
    chosen: set[str] = set()
    for path in changed:
        parts = path.split("/")
        if parts[0] in ("alphaapollo", "tests") and parts[1] == "plugins" and len(parts) > 3:
            chosen.add(f"tests/plugins/{parts[2]}")
        elif path.endswith(".md") or parts[0] == "docs":
            chosen.add(PAGES)
        else:
            return []
    return sorted(chosen)


if __name__ == "__main__":
    print(*choose_tests(sys.stdin.read().split()))
