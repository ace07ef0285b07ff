"""Host synchronizations that the tests on the fake GPU assert, and that gpu-check expects on a real one."""

from __future__ import annotations

MORE = {
    "old": "copy to cpu in workers/model_worker.py merge_token_values",
    "prompts": "item in workers/shared_prompt_check.py _measure_mismatch",
    "expert_metrics": "copy to cpu in models/moe_routing.py compute_metrics",
    "expert_layers": "tolist in models/expert_parallel.py read_and_keep",
}


def count_update(steps: int = 1, **more: int) -> dict[str, int]:
    """Host synchronizations of a policy update: none per micro-batch, one per step, and three at the end."""
    return {
        "item in models/train_state.py clip_gradients": steps,
        "copy to cpu in workers/model_worker.py merge_token_values": 1,
        "tolist in workers/model_worker.py reduce": 2,
    } | {MORE[name]: number for name, number in more.items()}
