"""custom_reward_function.path=examples/reference/trajectory.py"""

from alphaapollo.types import Episode, Prompt


def compute_score(prompt: Prompt, trajectory: Episode) -> dict[str, float]:
    """Reward a right answer, and 0.1 for each turn whose action could be read, over a complete episode."""
    right = float(prompt.ground_truth is not None and prompt.ground_truth in trajectory.text)
    readable = sum(turn.valid for turn in trajectory.turns)
    return {"accuracy": right, "readable": 0.1 * readable}
