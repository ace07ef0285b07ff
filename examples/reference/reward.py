"""custom_reward_function.path=examples/reference/reward.py"""

from alphaapollo.types import Outcome, Prompt, Score


def compute_score(prompt: Prompt, completion: str) -> Score:
    """Compare the last line with the ground truth. Short answers get up to 0.1 more."""
    lines = completion.strip().splitlines()
    if not lines:
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "the answer is empty")
    right = float(lines[-1] == prompt.ground_truth)
    brevity = 0.1 * right / len(lines)
    return Score(right + brevity, {"accuracy": right, "brevity": brevity})
