"""The vLLM engine: the only room, besides weights/, that knows vLLM."""
