from collections.abc import Iterator

import pytest

from alphaapollo.tools.sandbox import SnippetSandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[SnippetSandbox]:
    with SnippetSandbox(max_concurrent=4) as sandbox:
        yield sandbox
