"""The environment with SGLang, which tests of the real engine need."""

from __future__ import annotations

import pytest

from alphaapollo.plugins.sglang.engine import RemoteSglangEngine

needs_sglang = pytest.mark.skipif(
    not RemoteSglangEngine.find_python().is_file(), reason="needs the environment of make setup-sglang"
)
