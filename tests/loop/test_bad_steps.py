"""A non-finite optimizer step: the run ends with the reason and the trajectories, or skips the step, or resumes with
other batches."""

from __future__ import annotations

import re

from tests.loop.replays import recording, replay
from tests.loop.stack import StackRunner

LOSS = """
from pathlib import Path

from alphaapollo.algorithms.policy_losses import PolicyLossOutput, register_policy_loss

BAD, CALLS = Path(__file__).with_name("bad"), []

@register_policy_loss("nan_for_a_batch")
def mine(inputs, config):
    "The gradient is NaN in the third batch of a run, and whenever this batch is trained on again."
    loss, batch = -inputs.logp * inputs.advantages, f"{float(inputs.logp.detach().sum()):.3f}"
    if inputs.logp.numel() > 20:  # smaller calls only check the function
        CALLS.append(batch)
    if len(CALLS) > 2 and not BAD.exists():
        BAD.write_text(batch)
    return PolicyLossOutput(loss / 0 if BAD.exists() and BAD.read_text() == batch else loss)
"""
SKIP = "trainer.on_bad_step=skip"


def test_non_finite_step_ends_the_run_or_is_skipped_or_avoided(stack: StackRunner) -> None:
    (stack.out / "loss.py").write_text(LOSS)
    command = (
        *(f"algorithm.custom_module={stack.out / 'loss.py'}", "actor_rollout_ref.rollout.name=fake"),
        *("actor_rollout_ref.actor.policy_loss.loss_mode=nan_for_a_batch", "trainer.val_before_train=False"),
        *("trainer.test_freq=-1", "trainer.save_freq=1", "trainer.total_training_steps=3"),
    )
    failed = stack.start(*command, "trainer.record_steps=[2]")
    assert failed.code == 1 and "gradient norm is nan at optimizer step 3;" in failed.output, failed.output
    assert SKIP in failed.output and "Traceback" not in failed.output
    assert len(failed.rollouts(2)) == 16, "the trajectories of the failed step"
    again = replay(stack, recording(failed, 2), command[0])
    assert again.code == 1 and "gradient norm is nan at" in again.output, again.output
    again = replay(stack, recording(failed, 2), command[0], SKIP)
    assert again.code == 0 and "before there was an outcome" in again.output, again.output
    assert "\nactor/steps_skipped " in again.output and "\nadvantages " in again.output

    skipped = stack.run(*command, SKIP, name="skip")
    assert [line.get("actor/steps_skipped", 0) for line in skipped.metrics[1:]] == [0, 1, 0]
    assert "(actor/steps_skipped)" in "".join(skipped.output.split())

    (other_batches,) = re.findall(r"data\.seed=\d+", failed.output)
    resumed = stack.run(*command, other_batches)
    assert "resumed from" in resumed.output and [line["step"] for line in resumed.metrics] == [0, 1, 2, 3]
    assert not any(line.get("actor/steps_skipped") for line in resumed.metrics)
