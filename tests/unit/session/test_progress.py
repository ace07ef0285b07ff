from __future__ import annotations

from alphaapollo.config.schema import Config
from alphaapollo.session.progress import Progress, TrainingGoal


def test_epochs_end_with_the_last_full_batch() -> None:
    goal = TrainingGoal.from_schedule(None, epochs=2, num_prompts=10, batch_size=4)
    assert goal == TrainingGoal(5, max_prompts=20)
    short = TrainingGoal.from_schedule(None, epochs=1, num_prompts=3, batch_size=4)
    assert short == TrainingGoal(1, max_prompts=4)  # one iteration at least
    assert TrainingGoal.from_schedule(7, epochs=2, num_prompts=10, batch_size=4) == TrainingGoal(7)


def test_dynamic_sampling_ends_with_the_epochs() -> None:
    """Iterations that consume 8 prompts each: two passes over 10 prompts are three of them, not five."""
    goal, progress = TrainingGoal.from_schedule(None, epochs=2, num_prompts=10, batch_size=4), Progress()
    steps = []
    while not goal.is_reached(progress):
        step = progress.step + 1
        progress.prompts_consumed += 8
        steps.append((step, goal.is_reached(progress, step)))
        progress.step = step
    assert steps == [(1, False), (2, False), (3, True)]
    assert goal.is_reached(Progress(step=3, prompts_consumed=24))  # as a resumed run finds it


def test_given_iterations_override_epochs() -> None:
    goal = TrainingGoal.from_schedule(3, epochs=1, num_prompts=10, batch_size=4)
    assert not goal.is_reached(Progress(step=2, prompts_consumed=800))
    assert goal.is_reached(Progress(step=3))


def test_each_role_counts_its_own_optimizer_steps() -> None:
    config = Config.model_validate(
        {
            "data": {"train_batch_size": 8},
            "env": {"rollout": {"n": 4}},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 16, "ppo_epochs": 1}},
            "critic": {"ppo_epochs": 4},
            "trainer": {"critic_warmup": 10},
        }
    )
    assert config.count_policy_optimizer_steps(100) == 90 * 2  # 32 trajectories are 2 mini-batches; none in the warm-up
    assert config.count_critic_optimizer_steps(100) == 100 * 2 * 4
    assert config.count_policy_optimizer_steps(5) == 0
