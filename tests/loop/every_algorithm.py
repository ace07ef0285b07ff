"""Every algorithm on one started stack: python -m tests.loop.every_algorithm MODEL DATA OUT

Each case starts from the same weights and runs two iterations. Its metrics are one line of OUT/metrics.jsonl.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import yaml

from alphaapollo.algorithms.advantages import estimator_names
from alphaapollo.algorithms.policy_losses import get_policy_loss, policy_loss_names
from alphaapollo.config.load import NO_USER_SETTINGS, find_shipped_config_folder, flatten_maps, load_config
from alphaapollo.config.schema import NO_TEACHER, Actor, Config, RolloutCorrection, Teacher
from alphaapollo.controller.launcher import launch_workers
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.launch.session import TrainingSession
from alphaapollo.observability.console import Console
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.rollout.self_teacher import TeacherPromptWriter
from alphaapollo.trainer.lifecycle import make_training_run, prepare_run
from alphaapollo.trainer.loop import train
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.setup.plan import make_worker_specs
from alphaapollo.workers.teacher import MovingAverageTeacher, load_teacher
from alphaapollo.workers.trust_region import TrustRegion
from examples.quickstart.make_task import make_model, make_tokenizer

ALONE = ("gae", "turn_gae", "reinforce", "remax", "reinforce_plus_plus", "none")
REWARD = '''
def compute_score(prompt, completion):
    """Reward an odd number of digits, about half of an untrained model's completions."""
    digits = sum(letter.isdigit() for letter in completion)
    return {"reward": float(digits % 2), "accuracy": float(digits % 2), "length": len(completion) / 100}
'''
PASSK = ["algorithm.passk_k=2"]  # of groups of 4
TEACHER = "TEACHER"  # replaced by the teacher's folder
LONGER_PROMPTS = "teacher.self_teacher.max_prompt_length=256"  # the tokenizer has one token per byte
EXTRA = {  # in addition to the case's own settings
    "distill": [f"teacher.model.path={TEACHER}"],
    "mopd": [f"teacher.model.path={TEACHER}"],
    "grpo_passk_analytic": PASSK,
    "pods": ["algorithm.filtration.size=2"],
    "magistral": ["reward.components={}", "reward.required=[]"],
    "prorl": ["algorithm.reference_reset.every=1", "algorithm.reference_reset.patience=null"],
    "gdpo": ["algorithm.gdpo_rewards=[accuracy,length]"],
    "sdft": [LONGER_PROMPTS],
    "sdpo": [LONGER_PROMPTS],
    "reference_kl_dual": ["algorithm.kl_ctrl.kl_coef=0.1"],
}


def cases() -> dict[str, list[str]]:
    """Overrides by name: each recipe of configs/algorithm, each estimator and each loss that no recipe uses, and
    teacher divergences with and without a reward."""
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    files = sorted((find_shipped_config_folder() / "algorithm").glob("*.yaml"))
    recipes = {file.stem: flatten_maps(yaml.safe_load(file.read_text())) for file in files}
    estimators = {*estimator_names()} - {recipe["algorithm.adv_estimator"] for recipe in recipes.values()}
    losses = {*policy_loss_names()} - {recipe.get(loss, "ppo") for recipe in recipes.values()}
    plain = {name: [f"algorithm={name}"] for name in recipes}
    plain |= {f"adv_estimator={name}": [f"algorithm.adv_estimator={name}"] for name in sorted(estimators)}
    plain |= {f"loss_mode={name}": ["algorithm.adv_estimator=grpo", f"{loss}={name}"] for name in sorted(losses)}
    for name, estimator in (("sampled", "none"), ("jsd", "none"), ("forward", "grpo")):
        taught = [f"teacher.divergence={name}", f"teacher.model.path={TEACHER}"]
        plain[f"divergence={name}"] = [f"algorithm.adv_estimator={estimator}", *taught]
    return {name: [*words, *EXTRA.get(name, [])] for name, words in plain.items()}


def settings(model: str, data: str, out: Path, words: list[str]) -> Config:
    """Configuration of a case: 32 trajectories per iteration, in two optimizer steps."""
    sizes = [
        f"data.train_files={data}",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.kv_cache_gib=0.1",
        f"custom_reward_function.path={out / 'reward.py'}",
        f"trainer.output_dir={out}",
        "trainer.total_training_steps=2",
        "trainer.cpu_threads=1",
        "actor_rollout_ref.rollout.cpu_threads=1",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
    words = [word.replace(TEACHER, str(out / "teacher")) for word in words]
    first = load_config(Config, "ppo", [*sizes, *words])
    alone = first.group_size == 1 and first.algorithm.adv_estimator in ALONE
    group = ["data.train_batch_size=32", "env.rollout.n=1"] if alone else ["data.train_batch_size=8", "env.rollout.n=4"]
    return load_config(Config, "ppo", [*sizes, *words, *group])


@dataclass
class ListTracker:
    """A tracker that keeps all metrics in a list."""

    lines: list[dict[str, float]] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append({"step": step, **metrics})

    def close(self) -> None:
        pass


def use(worker: Any, actor: Actor, correction: RolloutCorrection, teacher: Teacher) -> None:
    """Change the settings of a training rank."""
    worker.actor, worker.correction = actor, correction
    worker.policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    optimizers = worker.__dict__.setdefault("optimizers_of_stack", worker.state.optimizers)
    worker.trust_region = TrustRegion(worker) if actor.optim.name == "trpo" else None
    worker.state.optimizers = [] if worker.trust_region else optimizers
    worker.companions = [one for one in worker.companions if not isinstance(one, TrustRegion)]
    worker.companions += [worker.trust_region] if worker.trust_region else []
    worker.find("teacher").teacher = NO_TEACHER if teacher.uses_self_teacher else teacher
    worker.companions = [one for one in worker.companions if not isinstance(one, MovingAverageTeacher)]
    worker.companions += [load_teacher(worker, teacher, {})] if teacher.uses_self_teacher else []


def use_self_teacher(worker: Any, teacher: Teacher) -> None:
    """Change the self-teacher of a rollout worker."""
    renderer, own = Renderer(load_tokenizer(worker._setup.model.path)), teacher.self_teacher
    writer = TeacherPromptWriter(own, renderer.encode_for_prompt, own.max_prompt_length or 48)
    worker._teacher_prompts = writer if teacher.uses_self_teacher else None


async def run_case(config: Config, workers: Any, start: Path) -> list[dict[str, float]]:
    prepared = await asyncio.to_thread(
        prepare_run, config, NO_USER_SETTINGS, Console()
    )  # it has an event loop of its own
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    await workers.policy.ranks.call(lambda worker: use(worker, actor, correction, config.teacher))
    await workers.engines.ranks.call(lambda worker: use_self_teacher(worker, config.teacher))
    await workers.policy.load(str(start / "policy"))
    await workers.critic.load(str(start / "critic"))
    needed = SimpleNamespace(
        policy=workers.policy,
        critic=workers.critic if prepared.plan.placement.has_critic else None,
        reward_model=None,
        engines=workers.engines,
    )
    session = TrainingSession(config, needed, Console(), ListTracker())  # type: ignore[arg-type]
    session.console.start(total_steps=2, completed_steps=0)
    run = make_training_run(prepared, session, Progress(kl_coef=config.algorithm.kl_ctrl.kl_coef))
    await run.weights.publish(0)
    await train(run)
    run.rollout_log.close()
    session.console.close()
    return session.tracker.lines  # type: ignore[attr-defined]


async def main(model: str, data: str, out: Path) -> None:
    (out / "reward.py").write_text(REWARD)
    rows = pd.read_parquet(data)
    rows["extra_info"] = [info | {"length_budget": 8, "demonstration": "7"} for info in rows["extra_info"]]
    rows.to_parquet(out / "train.parquet")
    data = str(out / "train.parquet")
    make_tokenizer(out / "teacher")
    make_model(out / "teacher", seed=1)
    everything = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true"]
    everything += [f"teacher.model.path={TEACHER}", "teacher.divergence=sampled"]
    prepared = await asyncio.to_thread(prepare_run, settings(model, data, out, everything), NO_USER_SETTINGS, Console())
    specs = make_worker_specs(prepared.config, prepared.plan, new_run_id(), 2, prepared.inputs.has_reward_function)
    workers = await launch_workers(specs, "local", prepared.config.trainer.start_timeout, {})
    try:
        await workers.policy.save(str(out / "policy"))
        assert workers.critic is not None
        await workers.critic.save(str(out / "critic"))
        await asyncio.gather(workers.policy.wait_for_save(), workers.critic.wait_for_save())
        with (out / "metrics.jsonl").open("w") as file:
            for name, words in cases().items():
                started = time.perf_counter()
                lines = await run_case(settings(model, data, out, words), workers, out)
                seconds = time.perf_counter() - started
                print(json.dumps({"name": name, "seconds": seconds, "lines": lines}), file=file, flush=True)
    finally:
        await workers.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
