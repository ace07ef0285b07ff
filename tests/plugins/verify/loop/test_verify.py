"""`alphaapollo verify` on runs: in the run, of a recording, of a run without one, and with a wrong weight."""

from __future__ import annotations

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from alphaapollo.plugins.verify.command import main as verify
from alphaapollo.runs.checkpoint_folder import MANIFEST, write_manifest
from alphaapollo.runs.update_checks import read_checks
from tests.loop.replays import recording
from tests.loop.stack import StackRunner
from tests.plugins.verify.loop.test_replay import ENDS, FAKE

COMMAND = "alphaapollo.plugins.verify.command"
AGREED = r"\b(\d+) of \1 quantities agree with the reference"


@pytest.mark.core
def test_a_run_is_verified(stack: StackRunner, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("algorithm.adv_estimator=gae", "trainer.verify_first_iteration=True", "trainer.record_steps=[2]")
    done = stack.run(*FAKE, *ENDS, *settings)
    assert "verified the update of iteration 1 in " in done.output
    assert re.search(rf"{AGREED}, not covered: critic: gradient \(.*\) \(docs/verify\.md\)", done.output), done.output
    found = {check.quantity for check in read_checks(done.folder)}
    assert found >= {"advantages", "old log-probs", "values", "weights"}
    assert not recording(done, 1).exists() and recording(done, 2).is_dir()

    assert verify([str(done.folder)]) == 0
    assert re.search(AGREED, printed := capsys.readouterr().out), printed
    assert verify([str(done.folder), "--iteration", "1"]) == 2
    assert "it recorded 2" in capsys.readouterr().err

    assert verify([str(done.folder / "rollouts")]) == 2 and "is no run" in capsys.readouterr().err

    outcome = recording(done, 2) / "outcome"
    weights = load_file(outcome / "policy/weights.safetensors")
    weights["model.model.norm.weight"] *= 1.001
    save_file(weights, outcome / "policy/weights.safetensors")
    assert verify([str(done.folder)]) == 2 and "is damaged" in capsys.readouterr().err
    (outcome / MANIFEST).unlink()
    write_manifest(outcome)
    assert verify([str(done.folder)]) == 1
    assert "weights differs by" in (printed := capsys.readouterr().out) and "(norm.weight)" in printed

    shutil.rmtree(done.folder / "recorded")
    assert verify([str(done.folder)]) == 2  # the run's reward function is code
    assert "custom_reward_function.path=" in (printed := capsys.readouterr().err), printed
    again = stack.call(COMMAND, [done.folder, f"custom_reward_function.path={stack.reward}"])
    assert again.code == 0 and "Recording its next iteration" in again.output, again.output
    assert re.search(AGREED, again.output), again.output
    assert (done.folder / "verify/step_1/recorded/step_000001/verification.jsonl").is_file()
