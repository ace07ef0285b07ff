"""Matrix products of an update, computed alone, and the operations of an update by processor time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from alphaapollo.batching.batch import RankBatch
from alphaapollo.models.cpu_linear import compute_weight_grad, linear
from alphaapollo.models.lm_head import LOGIT_LIMITS

SHOWN = 18  # operations of a profile


class Product(NamedTuple):
    """Shape of a linear layer's products for n tokens: x [n, inputs], W [outputs, inputs]."""

    tokens: int
    inputs: int
    outputs: int
    is_head: bool = False
    recomputes: bool = False  # the backward pass repeats the product of the forward pass


def count_update_products(model: nn.Module, batch: RankBatch) -> Counter[Product]:
    """Count the linear layers of one update by shape: those of the decoder for each micro-batch, and the output head
    for each block of response tokens. A shared prompt counts once in a micro-batch."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head]
    vocab_size, hidden_size = head.weight.shape
    size = max(1, LOGIT_LIMITS["cpu"].block // vocab_size)
    counts: Counter[Product] = Counter()
    for micro in (micro for mini_batch in batch.mini_batches for micro in mini_batch.micro_batches):
        rows = batch.rows.select(micro)
        tokens = int(rows.lengths.sum())
        if (shared := rows.shared_prompts) is not None:
            prompts = dict(zip(shared.prefix_ids.tolist(), shared.lengths.tolist(), strict=True))
            tokens += sum(prompts.values()) - int(shared.lengths.sum())
        for layer in layers:
            counts[Product(tokens, layer.in_features, layer.out_features)] += 1
        responses = int(rows.response_lengths.sum())
        for chunk in [size] * (responses // size) + [responses % size] * bool(responses % size):
            counts[Product(chunk, hidden_size, vocab_size, True, responses > size)] += 1
    return counts


class MatrixProducts:
    """Forward and backward products of these layers: three for each, and a fourth where logits are computed twice."""

    def __init__(self, counts: Counter[Product], dtype: torch.dtype):
        self.counts, self.dtype = counts, dtype
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def compute(self) -> None:
        for product, count in self.counts.items():
            tokens, inputs, outputs, _, recomputes = product
            x, weight, grad = (self._get(*shape) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
            for _ in range(count):
                for _ in range(1 + recomputes):
                    linear(x, weight)
                linear(grad, weight.t())
                compute_weight_grad(grad, x)

    def describe(self, processor_seconds: float) -> dict[str, float]:
        """Return FLOPs, the head's share of them, and FLOP/s per second of processor time."""
        flops = {product: 2 * (3 + product.recomputes) * product.tokens * product.inputs * product.outputs * count
                 for product, count in self.counts.items()}  # fmt: skip
        total = sum(flops.values())
        head = sum(value for product, value in flops.items() if product.is_head)
        return {
            "tflop": round(total / 1e12, 3),
            "head_share": round(head / total, 3),
            "gflops_per_core": round(total / processor_seconds / 1e9, 1),
        }

    def _get(self, *shape: int) -> Tensor:
        if shape not in self._inputs:
            self._inputs[shape] = torch.randn(shape, dtype=self.dtype)
        return self._inputs[shape]


class BatchedProducts(TorchDispatchMode):
    """Batched products of an update, which are those of attention over short rows. Records them as a context manager,
    and computes them alone, with random inputs of the same shapes, strides and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self._inputs.append((self._make(args[0]), self._make(args[1])))
        return func(*args, **(kwargs or {}))

    def compute(self) -> None:
        for left, right in self._inputs:
            torch.bmm(left, right)

    def _make(self, like: Tensor) -> Tensor:
        key = like.shape, like.stride(), like.dtype
        if key not in self._known:
            self._known[key] = torch.empty_strided(*key[:2], dtype=like.dtype).normal_()
        return self._known[key]


def profile_operations(update: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of the main operations of one update, as torch.profiler sees them in the calling threads."""
    with profile(activities=[ProfilerActivity.CPU]) as result:
        update()
    found = {event.key: event.self_cpu_time_total / 1e6 for event in result.key_averages()}
    largest = sorted(found, key=found.__getitem__, reverse=True)[:SHOWN]
    return {"total": round(sum(found.values()), 3)} | {name: round(found[name], 3) for name in largest}
