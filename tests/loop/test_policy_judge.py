"""The policy as its own judge: main_ppo with reward.judge.backend=policy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pandas as pd
import torch
from transformers import PreTrainedTokenizerFast

from examples.quickstart.make_task import make_tokenizer
from tests.loop.engine_kit import make_model
from tests.loop.stack import StackRunner

ASYNC = ("trainer.async_mode=carry", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis")


def make_judge_model(folder: Path) -> None:
    """Qwen3 that answers every message with `SCORE: 0` or `SCORE: 1`, both equally probable at temperature 1.

    Its layers add nothing to the embeddings, so each token depends only on the one before it.
    """
    make_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    size = 288  # at least one dimension per token
    sizes = {"hidden_size": size, "num_hidden_layers": 1, "tie_word_embeddings": False}
    model = make_model("Qwen3", seed=0, eos_token_id=tokenizer.eos_token_id, **sizes)
    (layer,) = model.model.layers
    reply = tokenizer.encode("\nSCORE: ")
    digits = tokenizer.encode("01")
    following = [*pairwise(reply), *((reply[-1], digit) for digit in digits)]
    following += [(digit, tokenizer.eos_token_id) for digit in digits]
    with torch.no_grad():
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, model.lm_head.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        for token, successor in following:
            model.lm_head.weight[successor, token] = 1.5  # the final norm scales the embedding to sqrt(288), about 17
    model.save_pretrained(folder)


def test_policy_judges_its_own_answers(stack: StackRunner) -> None:
    """Also while answers are carried over an update. tests/unit/rollout/test_worker.py shows it for one call."""
    make_judge_model(stack.out / "model")
    data = stack.out / "train.parquet"
    pd.read_parquet(stack.task.data / "train.parquet").assign(data_source="judge").to_parquet(data)
    done = stack.run(
        *ASYNC,
        f"actor_rollout_ref.model.path={stack.out / 'model'}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.optim.lr=1e-5",  # replies keep their form
        *(f"data.train_files={data}", f"data.val_files={data}", "data.max_prompt_length=128"),
        *("custom_reward_function.path=", "reward.judge.backend=policy", "reward.judge.prompt='{question} {answer}'"),
        *("reward.judge.temperature=1", "reward.judge.max_tokens=16"),
        *("trainer.total_training_steps=3", "trainer.test_freq=-1"),
    )
    lines = done.metrics[1:]
    assert len(lines) == 3 and all(line["outcome/failed"] == 0 for line in lines)
    assert all(line["judge/judgements"] == line["rollout/trajectories"] == 16 for line in lines)
    assert all(line["judge/cache_hit_rate"] < 1 for line in lines)
    assert max(line["actor/grad_norm"] for line in lines) > 0  # different verdicts about answers to one question
    rewards = {record["reward"] for step in (1, 2, 3) for record in done.rollouts(step)}
    assert rewards == {0.0, 1.0}
