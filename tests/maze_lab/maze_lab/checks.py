from pathlib import Path

from alphaapollo.runs.update_checks import Check
from alphaapollo.trainer.replay.recording import read_recording


def check_turns(folder: Path) -> list[Check]:
    """Check that no episode of a recorded update has more than two turns."""
    inputs, _ = read_recording(folder)
    counts = [len(one.turns) for group in inputs.groups for one in group.trajectories]
    return [Check("turns", f"{len(counts)} episodes", float(max(counts) > 2), 0.0, "at most two")]
