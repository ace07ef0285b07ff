"""Non-finite optimizer steps: the run ends with the reason and the trajectories, or skips the step."""

from __future__ import annotations

import re
from pathlib import Path

from tests.loop.conftest import FinishedRun
from tests.loop.replays import recording, replay
from tests.loop.stack import StackRunner

HERE = ("actor_rollout_ref.rollout.name=fake", "trainer.val_before_train=False", "trainer.test_freq=-1")
LOSS = """
from alphaapollo.algorithms.policy_losses import PolicyLossOutput, register_policy_loss

@register_policy_loss("nan_at_full_size")
def mine(inputs, config):
    loss = -inputs.logp * inputs.advantages
    return PolicyLossOutput(loss / 0 if inputs.logp.numel() > 20 else loss)
"""


def overrides(folder: Path) -> tuple[str, ...]:
    (folder / "loss.py").write_text(LOSS)
    return (
        *HERE,
        f"algorithm.custom_module={folder / 'loss.py'}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=nan_at_full_size",
    )


def test_non_finite_step_ends_the_run_or_is_skipped(stack: StackRunner) -> None:
    done = stack.start(*overrides(stack.out), "trainer.record_steps=[1]")
    assert done.code == 1 and "gradient norm is nan at optimizer step 1;" in done.output, done.output
    assert "trainer.on_bad_step=skip" in done.output and "Traceback" not in done.output
    assert len(done.rollouts(1)) == 16, "the trajectories of the failed step"
    check_replays(stack, done)
    done = stack.run(*overrides(stack.out), "trainer.on_bad_step=skip", name="skip")
    for metrics in done.metrics[1:]:
        assert metrics["actor/steps_skipped"] == metrics["actor/optimizer_steps"] > 0
    assert "(actor/steps_skipped)" in "".join(done.output.split())


def check_replays(stack: StackRunner, done: FinishedRun) -> None:
    """The replay reproduces the error; with the step skipped, it prints metrics."""
    again = replay(stack, recording(done, 1))
    assert again.code == 1 and "gradient norm is nan at" in again.output, again.output
    again = replay(stack, recording(done, 1), "trainer.on_bad_step=skip")
    assert again.code == 0 and "before there was an outcome" in again.output, again.output
    assert "\nactor/steps_skipped " in again.output and "\nadvantages " in again.output


ONE_BATCH = """
from pathlib import Path

from alphaapollo.algorithms.policy_losses import PolicyLossOutput, register_policy_loss

BAD, CALLS = Path({folder!r}) / "bad", []

@register_policy_loss("nan_for_a_batch")
def mine(inputs, config):
    "The gradient is NaN in the third batch of a run, and whenever this batch is trained on again."
    loss, batch = -inputs.logp * inputs.advantages, f"{{float(inputs.logp.detach().sum()):.3f}}"
    if inputs.logp.numel() > 20:  # smaller calls only check the function
        CALLS.append(batch)
    if len(CALLS) > 2 and not BAD.exists():
        BAD.write_text(batch)
    return PolicyLossOutput(loss / 0 if BAD.exists() and BAD.read_text() == batch else loss)
"""


def test_hint_of_a_non_finite_step_works(stack: StackRunner) -> None:
    (stack.out / "loss.py").write_text(ONE_BATCH.format(folder=str(stack.out)))
    command = (
        *HERE,
        f"algorithm.custom_module={stack.out / 'loss.py'}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=nan_for_a_batch",
        *("trainer.save_freq=1", "trainer.total_training_steps=3"),
    )
    done = stack.start(*command)
    assert done.code == 1 and "gradient norm is nan at optimizer step 3;" in done.output, done.output
    (other_batches,) = re.findall(r"data\.seed=\d+", done.output)
    done = stack.run(*command, other_batches)
    assert "resumed from" in done.output and [line["step"] for line in done.metrics] == [0, 1, 2, 3]
    assert not any(line.get("actor/steps_skipped") for line in done.metrics)
