from alphaapollo.types import Prompt
from maze_lab.settings import PathSettings


def score_path(prompt: Prompt, completion: str, settings: PathSettings) -> float:
    """Return the share of the way that a path goes."""
    return max(settings.base, min(1.0, completion.count(">") / int(prompt.ground_truth or 1)))
