"""Distillation through `learn` on a real policy worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.config.keys import replace_value
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, Teacher
from alphaapollo.controller.placement import Machine
from alphaapollo.controller.worker_groups import LocalWorkerGroups
from alphaapollo.launch.plan import resolve_plan
from alphaapollo.launch.specs import make_worker_specs
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.timing import Timer
from alphaapollo.session.progress import Progress
from alphaapollo.trainer.run_state import LearnerState
from alphaapollo.trainer.step.learn import learn
from tests.unit.session.teacher_server import Answer, serve
from tests.unit.tiny import save_model
from tests.unit.trainer.samples import group, trajectory

ITERATIONS = 3


def config_of(policy: Path, teacher: Path, divergence: str) -> Config:
    words = [
        "algorithm=distill",
        f"actor_rollout_ref.model.path={policy}",
        f"teacher.model.path={teacher}",
        f"teacher.divergence={divergence}",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "actor_rollout_ref.rollout.name=fake",
        "actor_rollout_ref.rollout.num_engines=1",
        "trainer.controller=local",
        "trainer.cpu_threads=1",
        "trainer.device=cpu",
    ]
    return replace_value(load_config(Config, "ppo", words), "trainer.n_gpus_per_node", 1)


async def distances(config: Config) -> list[dict[str, float]]:
    """Metrics of a few iterations on the same texts."""
    plan = resolve_plan(config, Machine(2, 0), [])
    specs = make_worker_specs(config, plan, "test", ITERATIONS, has_reward_function=False)
    trained = {role: build for role, build in specs.rank_builders.items() if role != "reward model"}
    workers = LocalWorkerGroups(replace(specs, engine_builder=None, rank_builders=trained))
    run = LearnerState(
        config=config,
        plan=plan,
        workers=workers,
        progress=Progress(kl_coef=0.0),
        console=Console(Terminal(quiet=True)),
    )
    groups = [group(trajectory(0, 0.0, length)) for length in (6, 9, 12, 4)]
    learned = [await learn(run, step + 1, groups, Timer()) for step in range(ITERATIONS)]
    await workers.close()
    return [one.metrics for one in learned]


@pytest.mark.parametrize("divergence", ["sampled", "jsd"])
def test_the_student_approaches_a_teacher_on_the_ranks_or_behind_a_server(tmp_path: Path, divergence: str) -> None:
    """Half of the divergence is from the server, half from the ranks."""
    from transformers import AutoModelForCausalLM

    folder = save_model("llama", tmp_path / "teacher")
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def answer(path: str, request: dict[str, Any]) -> Answer:
        tokens, scores = request["prompt"], [None]
        for token, logp in zip(tokens[1:], plain(torch.tensor([tokens])).logits[0].log_softmax(-1), strict=False):
            chosen = {token, *logp.topk(request["prompt_logprobs"]).indices.tolist()}
            scores.append({str(one): {"logprob": float(logp[one])} for one in chosen})
        return {"choices": [{"text": "", "prompt_logprobs": scores}]}

    async def compare() -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        local = config_of(save_model("qwen3", tmp_path / "policy"), folder, divergence)
        local = replace_value(local, "teacher.top_k", 6)
        async with serve(answer) as url:
            models = {"near": {"path": str(folder)}, "far": {"base_url": url, "name": "big"}}
            by_source = {"*": {"near": 0.5, "far": 0.5}}
            mixed = Teacher(divergence=divergence, top_k=6, models=models, by_source=by_source)
            return await distances(local), await distances(replace_value(local, "teacher", mixed))

    alone, mixed = asyncio.run(compare())
    # a KL estimate needs sampled texts, so the distance of the log-probs is compared
    name = "critic/advantages/abs_mean" if divergence == "sampled" else "distill/reverse_kl"
    assert alone[0][name] > alone[1][name] > alone[2][name] > 0
    for line in alone:
        assert 0 < line["distill/agreement"] < 1 and line["actor/grad_norm"] > 0 and line["critic/rewards/mean"] == 0
        assert ("distill/divergence" in line) == (divergence == "jsd")
        assert ("critic/advantages/share_zero" in line) == (divergence == "sampled")
    for one, other in zip(alone, mixed, strict=True):
        names = [name for name in one if name.startswith("distill/")] + ["actor/loss", "actor/grad_norm"]
        assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-4)
