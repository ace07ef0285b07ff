"""Count what the output head's operations on logits cost: separate operations against one kernel of torch.compile.

    .venv/bin/python scripts/bench/head.py

The operations between two matrix products (models/lm_head.py) run on bfloat16 logits of one chunk. Counted are kernels
and the bytes per logit that they read and write: of each operation's tensors or, for fused operations, by
torch.compile's own count, in which a kernel reads a tensor once. Nothing is timed. The last line is a JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch._inductor import config, metrics  # noqa: E402
from torch._inductor.compile_fx import inductor_metrics_log  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from alphaapollo.models.lm_head import LogitTransform, compute_chunk_stats, compute_logit_gradient  # noqa: E402

TOKENS, VOCABULARY = 64, 32_768
VIEWS = ("view", "unsqueeze", "slice", "select", "expand", "detach", "permute", "alias", "_unsafe_view", "empty")


class Counter(TorchDispatchMode):
    """Counts the operations that read or write logits, and their bytes."""

    kernels, num_bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves([args, kwargs, result]) if isinstance(one, torch.Tensor)]
        large = [one for one in tensors if one.numel() == TOKENS * VOCABULARY]
        if large and function.overloadpacket.__name__ not in VIEWS:
            self.kernels += 1
            self.num_bytes += sum(one.nbytes for one in large)
        return result


def count_separate(function: Callable[..., Any], *args: Any) -> tuple[int, float]:
    with Counter() as counter:
        function(*args)
    return counter.kernels, counter.num_bytes / (TOKENS * VOCABULARY)


def count_fused(function: Callable[..., Any], *args: Any) -> tuple[int, float]:
    torch._dynamo.reset()
    metrics.reset()
    inductor_metrics_log.setLevel(logging.INFO)  # makes torch.compile count bytes
    inductor_metrics_log.propagate = False
    torch.compile(function, dynamic=False)(*args)
    return metrics.generated_kernel_count, metrics.num_bytes_accessed / (TOKENS * VOCABULARY)


def main() -> None:
    config.fx_graph_cache = False  # cached code is not counted
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(TOKENS, VOCABULARY, generator=generator).bfloat16()
    targets, transform = torch.arange(TOKENS), LogitTransform(1.0, None)
    normaliser, _, entropy = compute_chunk_stats(raw, targets, transform, True)
    weights = torch.randn(TOKENS, generator=generator)
    gradient = (raw, targets, transform, normaliser, entropy, weights)
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "forward": (compute_chunk_stats, (raw, targets, transform, False)),
        "forward, entropy": (compute_chunk_stats, (raw, targets, transform, True)),
        "backward": (compute_logit_gradient, (*gradient, None)),
        "backward, entropy": (compute_logit_gradient, (*gradient, weights)),
    }
    print("| pass | kernels | bytes per logit | fused: kernels (CPU) | fused: bytes per logit |\n|---|---|---|---|---|")
    counts = {}
    for name, (function, args) in cases.items():
        separate, fused = count_separate(function, *args), count_fused(function, *args)
        counts[name] = {"separate": separate, "fused": fused}
        print(f"| {name} | {separate[0]} | {separate[1]:.0f} | {fused[0]} | {fused[1]:.0f} |")
    print(json.dumps({"benchmark": "head", "counts": counts}))


if __name__ == "__main__":
    main()
