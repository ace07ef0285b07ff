"""Settings of a loop of one's own, and its rows."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaapollo.config.errors import ConfigError
from alphaapollo.engines.weight_sync.verification import WeightSyncError
from alphaapollo.observability.console import Console
from alphaapollo.own_loop.rows import RowReader, make_row
from alphaapollo.own_loop.sampled_rows import check_engine_log_probs, check_first_ratio
from alphaapollo.own_loop.setup import expand_key, load_loop_config, prepare_loop
from alphaapollo.types import Row

SAMPLED = Row([1, 2, 3, 4], [0, 0, 1, 1], [0.0, 0.0, -2.0, -3.0], [3], temperature=0.9)


def test_beginnings_of_keys_may_be_left_out() -> None:
    long = "actor_rollout_ref."
    expanded = {
        "model.path=a": f"{long}model.path=a",
        "lora_rank=8": f"{long}model.lora_rank=8",
        "optim.betas=[0.9,0.95]": f"{long}actor.optim.betas=[0.9,0.95]",
        "rollout.name=hf": f"{long}rollout.name=hf",
        "trainer.seed=1": "trainer.seed=1",
        "algorithm=dapo": "algorithm=dapo",
        "modle.path=a": "modle.path=a",
    }
    assert {word: expand_key(word) for word in expanded} == expanded


def test_ranks_and_engines_choose_the_controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    chosen = {}
    for engines, ranks in ((None, None), (0, 1), (2, 1), (1, 2)):
        config = load_loop_config({"model.path": tmp_path}, [], engines, ranks)
        chosen[engines, ranks] = config.trainer.controller, config.trainer.n_gpus_per_node
    assert chosen == {(None, None): ("local", 1), (0, 1): ("local", 1), (2, 1): ("ray", 1), (1, 2): ("ray", 2)}
    assert load_loop_config({"model.path": tmp_path}, ["trainer.controller=ray"], 1, 1).trainer.controller == "ray"
    with pytest.raises(ConfigError, match=r"model\.lora_rank"):
        load_loop_config({"lora_rnak": 8}, [], 1, 1)


def test_weights_of_a_call_choose_the_trained_tokens() -> None:
    reader, sampled = RowReader(None, 10), Row([1, 2, 3, 4], [0, 1, 1, 1], [0.0, -1.0, -2.0, -3.0], [3])
    half, some = reader.read([sampled, make_row([5, 6])], {"weights": [0.5, [0.0, 2.0]]})
    np.testing.assert_array_equal(half.columns["weights"], [0.0, 0.5, 0.5, 0.5])
    (chosen,) = reader.read([sampled], {"weights": [[0.0, 0.0, 2.0, 0.0]]})
    assert chosen.action_mask == [0, 0, 1, 0] and chosen.logprobs == [0.0, 0.0, -2.0, 0.0]
    assert some.action_mask == [0, 1] and make_row([5, 6, 7], weights=[0, 0, 1]).action_mask == [0, 0, 1]
    mixed = reader.read([make_row([5, 6], targets=[0, 9]), sampled])
    np.testing.assert_array_equal(mixed[1].columns["targets"], sampled.token_ids)
    with pytest.raises(ValueError, match="row 1: its column a is missing"):
        reader.read([make_row([5, 6], a=1.0), sampled])


@pytest.mark.parametrize(
    ("row", "columns", "problem"),
    [
        (SAMPLED, {}, None),
        (SAMPLED, {"weights": [[0, 0, 1.0, 0]]}, None),
        (replace(SAMPLED, temperature=None), {}, None),  # log-probs of the caller
        (replace(SAMPLED, temperature=0.5), {}, "temperature 0.5 of its samples, .* rollout.temperature=0.9"),
        (SAMPLED, {"weights": [[0, 1, 1, 1]]}, "no engine sampled 1 of its 3 trained tokens"),
        (SAMPLED, {"targets": [[1, 2, 3, 9]]}, "no engine sampled 1 of its 2"),
        (make_row([1, 2, 3, 4]), {}, "no engine sampled 3 of its 3"),
    ],
)
def test_ratios_need_the_engines_log_probs(row: Row, columns: Any, problem: str | None) -> None:
    rows = RowReader(None, 10).read([row], columns)
    with pytest.raises(ValueError, match=f"row 0.*{problem}") if problem else nullcontext():
        check_engine_log_probs(rows, 0.9)


@pytest.mark.parametrize(
    ("shift", "version", "is_checked"), [(2e-5, 7, True), (0.25, 6, False), (0.25, 7, True), (math.nan, 7, True)]
)
def test_the_first_ratio_is_one(shift: float, version: int, is_checked: bool) -> None:
    rows = [replace(SAMPLED, weight_versions=[(7, 2)])] * 8
    logprobs = [np.array([0.0, 0.0, -2.0 + shift, -3.0])] * 8
    problem = r"log-prob of 16 tokens is (-2.375|nan) under the trainer and -2.5 under the engine"
    with pytest.raises(WeightSyncError, match=problem) if is_checked and not shift < 0.1 else nullcontext():
        check_first_ratio(rows, logprobs, version, 1e-4)


def test_schedules_know_the_number_of_optimizer_steps(tmp_path: Path, model_folder: Any) -> None:
    def prepare(*words: str) -> Any:
        settings = {"model.path": model_folder("qwen3"), "trainer.output_dir": tmp_path}
        lengths = "data.max_prompt_length=64", "data.max_response_length=8"
        return prepare_loop(load_loop_config(settings, [*lengths, *words], 0, 1), False, Console())

    for word in ("optim.warmup_style=cosine", "optim.lr_warmup_steps_ratio=0.1"):
        with pytest.raises(ValueError, match=f"{word[6:]}.* the number of optimizer steps"):
            prepare(word)
        builder: Any = prepare(word, "trainer.total_training_steps=10").make_specs().rank_builders["policy"]
        assert builder.args[0].optimizer_steps == 10  # whatever the sizes of main_ppo's iterations
    prepare("optim.lr_warmup_steps=3")
