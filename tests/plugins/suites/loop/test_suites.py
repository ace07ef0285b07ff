"""Evaluation suites on the real stack: lm-eval against the engine of a training run, inspect-ai against its model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from alphaapollo.rollout.suites import SuiteResult, read_suite_results
from examples.quickstart.make_task import make_tokenizer
from tests.loop.conftest import MARK, ROOT, FinishedRun, Runner, Task, wait_until_nothing_is_left
from tests.loop.engine_kit import logprobs_of, make_model, needs_suites
from tests.loop.test_main_generation import GenerationRunner
from tests.loop.warm import Program

pytestmark = needs_suites

SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: ""
process_results: !function grade.process_results
generation_kwargs: {until: [], max_gen_toks: 16}
metric_list:
  - {metric: accuracy, aggregation: mean, higher_is_better: true}
"""
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["17", "4", "abc"]
doc_to_target: 0
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
GRADE = """
def process_results(doc, results):
    digits = sum(letter.isdigit() for letter in results[0])
    return {"accuracy": float(digits % 2)}
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import solver

@solver
def broken():
    async def solve(state, generate):
        raise RuntimeError("the tool is not there")
    return solve

@task
def fails():
    return Task(dataset=[Sample(input="1", target="1")], solver=broken(), scorer=match())
"""


@pytest.fixture(scope="module")
def trained(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, FinishedRun]]:
    """A run of one iteration with lm-eval in its validation. The model's answers differ from row to row."""
    out = tmp_path_factory.mktemp("suites")
    make_tokenizer(out / "model")
    make_model("Qwen3", seed=3, eos_token_id=258).save_pretrained(out / "model")
    rows = pd.read_parquet(task.data / "val.parquet")
    questions = [{"question": prompt[-1]["content"]} for prompt in rows["prompt"]]
    files = {"sums.yaml": SUMS, "choices.yaml": CHOICES, "grade.py": GRADE, "inspect_tasks.py": INSPECT}
    files |= {"both.yaml": "group: both\ntask: [sums, choices]\n", "fails.yaml": "task: fails\n"}
    files |= {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in questions)}
    for name, content in files.items():
        (out / name).write_text(content.replace("FOLDER", str(out)))
    runner = Runner(task, out)
    own = f"--include_path {out}"
    suites = [f"lm-eval:both {own} --apply_chat_template", f"lm-eval:fails {own} --unknown"]
    done = runner.run(
        f"actor_rollout_ref.model.path={out / 'model'}",
        f"trainer.val_suites={json.dumps(suites)}",
        "data.val_files=",
        "data.max_prompt_length=64",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=1",
        "trainer.keep_best=val/suite/sums/accuracy",
        "trainer.controller=local",
    )
    wait_until_nothing_is_left(runner)
    yield runner, done
    runner.close()


def read_samples(done: FinishedRun, task: str) -> list[dict[str, Any]]:
    """Samples of lm-eval in order of the rows."""
    (file,) = done.folder.glob(f"suites/step_1/both/files/*/samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


@pytest.mark.nightly
def test_scheduled_suite_equals_our_evaluation_of_the_trained_model(
    trained: tuple[Runner, FinishedRun], tmp_path: Path
) -> None:
    runner, done = trained
    generation = GenerationRunner(runner.task, tmp_path)
    own = generation.run(
        f"data.path={runner.task.data}/val.parquet",
        "data.n_samples=1",
        "data.max_response_length=16",
        "rollout.temperature=0",
        f"model.path={done.folder / 'model'}",
        "trainer.controller=local",
    )
    results = [json.loads(line) for line in (own.folder / "results.jsonl").read_text().splitlines()]
    texts = [one["turns"][-1]["text"] for one in sorted(results, key=lambda one: one["prompt_id"])]
    assert len(set(texts)) == len(texts) == 8
    found = [sample["resps"][0][0] for sample in read_samples(done, "sums")]
    assert found == [text.rstrip("\ufffd") for text in texts]  # vLLM does not send incomplete characters
    accuracy = json.loads((own.folder / "summary.json").read_text())["all"]["figures"]["avg@1"]["value"]
    assert done.metrics[-1]["val/suite/sums/accuracy"] == accuracy and 0 < accuracy < 1


@pytest.mark.nightly
def test_multiple_choice_reads_the_log_probs_of_transformers(trained: tuple[Runner, FinishedRun]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, done = trained
    model = AutoModelForCausalLM.from_pretrained(done.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(done.folder / "model")
    for sample in read_samples(done, "choices"):
        for choice, (answer,) in zip(("17", "4", "abc"), sample["resps"], strict=True):
            chat = [{"role": "user", "content": sample["doc"]["question"]}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(prompt + choice, add_special_tokens=False)["input_ids"]
            end = prompt.removeprefix(prompt.rstrip())  # lm-eval counts it to the answer
            length = len(tokenizer(end + choice, add_special_tokens=False)["input_ids"])
            assert float(answer[0]) == pytest.approx(sum(logprobs_of(model, ids)[-length:]), abs=1e-3)
    last = done.metrics[-1]
    assert "val/suite/choices/acc" in last and last["val/suite/both/failed"] == 0
    assert {name: last[name] for name in last if name.startswith("val/suite/fails/")} == {"val/suite/fails/failed": 1}
    assert "--unknown failed: exit code 2:" in done.output


@pytest.mark.nightly
def test_command_runs_inspect_on_the_newest_model(trained: tuple[Runner, FinishedRun]) -> None:
    runner, done = trained
    words = ["eval", done.folder, "rollout.kv_cache_gib=0.1", "rollout.cpu_threads=1"]
    words += ["--suite", "inspect:examples/suites/sums.py@sums_chat --max-tokens 8"]
    words += ["--suite", f"inspect:{runner.out}/inspect_tasks.py@fails"]
    environment = os.environ | {MARK: str(runner.out)}
    program = Program("alphaapollo.cli.main", words, runner.out / "eval.txt", environment, ROOT, warm=True)
    runner.programs.append(program)
    result = runner.finish(program)
    wait_until_nothing_is_left(runner)
    assert result.code == 1, result.output
    found: dict[str, SuiteResult] = {one.name: one for one in read_suite_results(done.folder) if one.model == "model"}
    (score,) = found["sums_chat"].scores
    assert (score.task, score.metric, score.rows, found["sums_chat"].error) == ("sums_chat", "accuracy", 8, "")
    assert found["fails"].scores == [] and "the tool is not there" in found["fails"].error
    assert "the tool is not there" in result.output
