"""SmolLM2-135M-Instruct, a pretrained model: one GRPO iteration, and engine, trainer and transformers agree on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphaapollo.algorithms.sampling import PendingCompletion, decode_batch
from alphaapollo.config.schema import Model
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder, make_rows
from alphaapollo.models.policy import PolicyModel
from alphaapollo.types import Sampling
from examples.smollm2.make_task import make_data
from examples.smollm2.task import HELD_OUT_TOPICS, TRAIN_TOPICS, make_instructions
from tests.loop.conftest import ROOT, Runner, Task
from tests.loop.engine_kit import logprobs_of, start_engine

NUM_PROMPTS, MAX_TOKENS = 20, 16
END = 2  # <|im_end|>


@pytest.fixture
def runner(smollm2: Path, tmp_path: Path) -> Iterator[Runner]:
    make_data(tmp_path / "train.parquet", 4, TRAIN_TOPICS)
    make_data(tmp_path / "val.parquet", 16, HELD_OUT_TOPICS)
    started = Runner(Task(smollm2, tmp_path), tmp_path)
    yield started
    started.close()


@pytest.mark.core
def test_an_iteration_of_grpo(runner: Runner) -> None:
    program = runner.start(
        "trainer.controller=local",
        f"custom_reward_function.path={ROOT / 'examples/smollm2/reward.py'}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.rollout.temperature=0.7",
        "data.max_prompt_length=80",
        "data.max_response_length=24",
        "data.train_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
        "trainer.export_hf=false",
    )
    done = runner.finish(program)
    assert done.code == 0, done.output[-6000:]
    before, trained = done.metrics
    assert before["val/smollm2/json/accuracy"] in (0.0, 1.0) and 1 < before["val/response_length"] <= 24
    assert trained["outcome/scored"] == 1.0 and 1 < trained["actor/entropy"] < 6
    assert trained["mismatch/abs"] < 1e-4


@pytest.mark.nightly
def test_engine_trainer_and_transformers_agree(smollm2: Path, tmp_path: Path) -> None:
    """On the tokens of 20 prompts, greedy answers to them, and the answers' log-probs in float32."""
    plain = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    renderer = Renderer(load_tokenizer(str(smollm2)))
    chats = [[{"role": "user", "content": one.text}] for one in make_instructions(NUM_PROMPTS, HELD_OUT_TOPICS, "test")]
    prompts = [renderer.encode_prompt(chat) for chat in chats]
    padded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    unpadded = [ids[mask.bool()].tolist() for ids, mask in zip(padded.input_ids, padded.attention_mask, strict=True)]
    assert prompts == unpadded and renderer.eos_token_ids == (END,)

    with torch.inference_mode():
        answers = plain.generate(**padded, do_sample=False, max_new_tokens=MAX_TOKENS)[:, padded.input_ids.shape[1] :]
    expected = [cut_after_end(answer) for answer in answers.tolist()]
    sampling = Sampling(MAX_TOKENS, temperature=0.0, stop_token_ids=(END,))
    with start_engine(plain, tmp_path) as session:
        completions = session.generate(*((prompt, sampling) for prompt in prompts))
    assert [list(completion.token_ids) for completion in completions] == expected

    policy = PolicyModel(load_causal_lm(Model(path=str(smollm2)), "sdpa"))
    pending = [PendingCompletion(prompt, sampling) for prompt in prompts]
    rows = make_rows([np.array(p + a) for p, a in zip(prompts, expected, strict=True)], [len(p) for p in prompts])
    with torch.inference_mode():
        with policy.generation_mode():
            decode_batch(policy.next_logits, pending, torch.device("cpu"), lambda is_done: is_done)
        packed = MicroBatchBuilder(padded=False, device=torch.device("cpu"))
        of_trainer = policy(packed.build(rows, range(NUM_PROMPTS)), 1.0).logprobs.numpy()
    assert [draw.sampled for draw in pending] == expected

    of_plain = np.concatenate([logprobs_of(plain, p + a)[len(p) - 1 :] for p, a in zip(prompts, expected, strict=True)])
    of_engine = np.concatenate([completion.logprobs for completion in completions])
    assert len(of_plain) > 10 * NUM_PROMPTS
    assert np.abs(of_trainer - of_plain).max() < 1e-4
    assert np.abs(of_engine - of_plain).max() < 1e-4


def cut_after_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens
