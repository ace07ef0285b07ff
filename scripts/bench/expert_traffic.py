"""Calculate the bytes that a rank receives and sends in one micro-batch, with and without expert parallelism.

    .venv/bin/python scripts/bench/expert_traffic.py --model scripts/published_models/qwen3-30b-a3b --tokens 16384

The model is built on the meta device; nothing is measured. FSDP gathers a layer in the forward and again in the
backward pass, embedding and head once, and reduces float32 gradients. Expert parallelism sends the hidden states of
each chosen expert there and back, also with their gradients in the backward pass; gradient checkpointing repeats the
forward pass. The routers are assumed to choose all experts equally often. The last line is a JSON object; `ratio` is
the traffic without expert parallelism relative to that with ep_size equal to the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from alphaapollo.config.schema import Model  # noqa: E402
from alphaapollo.models.activation_memory import ModelSizes, load_on_meta_device, read_model_sizes  # noqa: E402
from alphaapollo.models.moe_routing import ExpertSizes  # noqa: E402

BF16, FLOAT32 = 2, 4


def count_traffic(
    sizes: ModelSizes, experts_per_token: int, num_ranks: int, ep_size: int, num_tokens: int, has_checkpointing: bool
) -> dict[str, float]:
    """Return the bytes of one rank by kind. num_tokens: tokens of the rank's micro-batch."""

    def share(group_size: int) -> float:
        """Part of a tensor that other ranks of the group have."""
        return (group_size - 1) / group_size

    layers = 2 * BF16 + FLOAT32  # gathered twice, reduced once
    dense = sizes.parameters - sizes.root_parameters - sizes.expert_parameters
    experts = layers * sizes.expert_parameters / ep_size * share(num_ranks // ep_size)
    num_layers = sizes.expert_parameters // sizes.layer_expert_parameters
    exchange = BF16 * num_tokens * experts_per_token * sizes.hidden_size * share(ep_size)
    return {
        "dense": (layers * dense + (BF16 + FLOAT32) * sizes.root_parameters) * share(num_ranks),
        "experts": experts,
        "tokens": 2 * exchange * num_layers * (3 if has_checkpointing else 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "scripts" / "published_models" / "qwen3-30b-a3b"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch on a rank")
    given = parser.parse_args()
    model = load_on_meta_device(Model(path=given.model), torch.bfloat16)
    sizes, experts = read_model_sizes(model), ExpertSizes.from_config(model.config)
    assert experts is not None, f"{given.model} is not a mixture of experts"
    print(f"{sizes.parameters / 1e9:.1f} billion parameters, {sizes.expert_parameters / 1e9:.1f} billion in experts")
    totals = {}
    for ep_size in (size for size in range(1, given.ranks + 1) if given.ranks % size == 0):
        for has_checkpointing in (False, True):
            found = count_traffic(
                sizes, experts.experts_per_token, given.ranks, ep_size, given.tokens, has_checkpointing
            )
            totals[ep_size, has_checkpointing] = sum(found.values())
            kinds = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in found.items())
            shown = f"ep_size {ep_size}, checkpointing {'on' if has_checkpointing else 'off'}"
            print(f"{shown}: {totals[ep_size, has_checkpointing] / 1e9:.1f} GB ({kinds})")
    print(json.dumps({"ratio": totals[1, False] / totals[given.ranks, False]}))


if __name__ == "__main__":
    main()
