"""The vLLM engine. Only this package and engines/weight_sync/vllm_* import vLLM."""

from __future__ import annotations
