from collections.abc import Iterator

import pytest

from alphaapollo.tools.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(max_concurrent=4) as sandbox:
        yield sandbox
