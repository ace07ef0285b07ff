from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

from examples.curriculum.compare import count_samples, read_curve
from examples.curriculum.make_task import long_sums, sums
from examples.quickstart.task import held_out, needs_carry, question


def test_samples_until_a_goal(tmp_path: Path) -> None:
    lines: list[dict[str, float]] = [{"step": 0, "val/accuracy": 0.25}]
    lines += [{"step": step, "rollout/trajectories": 128} for step in (1, 2, 3)]
    lines[2]["val/accuracy"] = 0.91
    lines[3]["val/accuracy"] = 0.89
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = read_curve(tmp_path)
    assert curve == [(0, 0.25), (256, 0.91), (384, 0.89)]
    assert [count_samples(curve, goal) for goal in (0.2, 0.9, 0.95)] == [0, 256, None]


def test_three_kinds_of_sums() -> None:
    pairs = {with_carry: list(islice(sums(random.Random(1), with_carry), 20)) for with_carry in (True, False)}
    assert all(needs_carry(*pair) is with_carry for with_carry, found in pairs.items() for pair in found)
    assert not any(held_out(question(*pair)) for found in pairs.values() for pair in found)
    assert all(1000 <= number <= 9999 for pair in islice(long_sums(random.Random(1)), 20) for number in pair)
