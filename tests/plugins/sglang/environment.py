"""The environment with SGLang, which tests of the real engine need."""

from __future__ import annotations

import pytest

from alphaapollo.plugins.sglang.settings import find_python

needs_sglang = pytest.mark.skipif(not find_python().is_file(), reason="needs the environment of make setup-sglang")
