"""Every recipe, estimator and loss trains on the real stack: finite metrics and a non-zero gradient."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loop.conftest import DEADLINE, ROOT, Task

ALWAYS = {
    "actor/loss",
    "actor/pg_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "critic/score/mean",
    "critic/rewards/mean",
    "sync/probe_gap",
}
CORRECTED = {"tis", "icepop", "mis", "mopd"}
ENGINE_LOGPROBS = {"bypass", "deepseek_v32", "dppo", "loss_mode=dppo_kl", "vespo"}
TAUGHT_ALONE = {"distill", "divergence=jsd", "sdft", "sdpo"}  # by whole distributions only: there are no advantages


@pytest.mark.core
def test_every_algorithm_trains(task: Task, tmp_path: Path) -> None:
    words = [str(task.model), str(task.data / "train.parquet"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.loop.every_algorithm", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    cases = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = {case["name"] for case in cases}
    assert {"grpo", "dapo", "prorl", "remax", "gdpo", "loss_mode=gspo_token"} <= names
    for case in cases:
        name, lines = case["name"], case["lines"]
        assert [line["step"] for line in lines] == [1, 2], name
        for line in lines:
            assert line.keys() >= ALWAYS, (name, ALWAYS - line.keys())
            assert all(math.isfinite(value) for value in line.values()), (name, line)
            assert line["actor/grad_norm"] > 0, (name, line)
            assert line["sync/probe_gap"] < 5e-5, name
            assert ("critic/advantages/abs_mean" in line) == (name not in TAUGHT_ALONE), name
            assert ("mismatch/k3" in line) == (name not in ENGINE_LOGPROBS), name
            assert ("actor/correction_weight" in line) == (name in CORRECTED), name
            assert ("actor/off_policy_masked" in line) == (name == "deepseek_v32"), name
    for name in ("distill", "mopd", "divergence=sampled", "divergence=jsd", "divergence=forward"):
        (case,) = (case["lines"] for case in cases if case["name"] == name)
        assert all(line["distill/reverse_kl"] > 0 and 0 < line["distill/agreement"] <= 1 for line in case), (name, case)
    for name in ("sdft", "sdpo"):
        (case,) = (case["lines"] for case in cases if case["name"] == name)
        assert all(line["distill/rows_with_context"] > (0.2 if name == "sdpo" else 0.99) for line in case), (name, case)
        assert all(line["distill/divergence"] > 0 for line in case), (name, case)
    by_name = {case["name"]: case["lines"] for case in cases}
    assert by_name["ppo"][0]["critic/grad_norm"] > 0
    assert "critic/grad_norm" not in by_name["grpo"][0]
    assert [line["reference/resets"] for line in by_name["prorl"]] == [1, 2]
    assert by_name["prorl"][0]["actor/ref_kl"] != by_name["prorl"][1]["actor/ref_kl"]
    assert "baseline/mean" in by_name["remax"][0]
    assert by_name["reference_kl_dual"][1]["actor/reward_kl_penalty_coeff"] == pytest.approx(
        max(0.0, 0.1 + 0.01 * (by_name["reference_kl_dual"][0]["actor/reward_kl_penalty_per_sequence"] - 6.0))
    )
