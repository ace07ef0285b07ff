"""Run folders for the tests of the viewer, written by the code that writes real ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import yaml
from starlette.testclient import TestClient

from alphaapollo.data.findings import DataFinding
from alphaapollo.observability.sample_metrics import convert_to_sample_result
from alphaapollo.observability.terminal import Terminal
from alphaapollo.plugins.evolving.pool import Candidate, Grade, Judgement, Pool, Position, Verdict
from alphaapollo.plugins.evolving.report import compute_round_metrics, write_results
from alphaapollo.plugins.viewer.index import RunIndex
from alphaapollo.rollout.suites import SuiteResult, SuiteScore
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.rollout_log import RolloutLog, TrainedRow
from alphaapollo.runs.run_plan import PlannedMemory, RunPlan, write_run_plan
from alphaapollo.runs.training_examples import LoggedExample, make_example_row, write_examples
from alphaapollo.runs.update_checks import Check, write_checks
from alphaapollo.trainer.evaluation.generation import FinishedResults, open_results_writer
from alphaapollo.trainer.evaluation.report import write_report
from alphaapollo.types import Outcome, Prompt, Row, Score, Trajectory, TrajectoryGroup
from tests import builders
from tests.builders import make_completion, make_turn

HOSTILE = (
    '<script>document.title="hacked"</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"\'><style>*{display:none}</style>'
)

MISSING = "/runs/9"
PAGES = (  # of the runs of `write_every_kind`, and one that does not exist
    *("/", "/runs/1", "/runs/1/health", "/runs/1/step/1", "/runs/1/step/1?view=samples", "/runs/1/step/1/0"),
    *("/runs/1/step/1/1?with=step/1/0", "/compare?run=1&run=2", MISSING, "/?by=sweep", "/runs/1/samples?text=7"),
    *("/runs/1/config", "/runs/3", "/runs/3/examples", "/runs/4", "/runs/4/results/0", "/runs/4/results/0/1"),
    *("/runs/5", "/runs/5/problems", "/runs/5/problems/17", "/runs/6/examples"),
)


def make_trajectory(prompt: int, sample: int, text: str, reward: float) -> Trajectory:
    turn = make_turn(make_completion([5, 6, 7], [-0.1, -0.2, -0.3], version=3), [1, 2], text)
    score = Score(reward, {"accuracy": reward}, Outcome.SCORED, f"because {text}")
    made = builders.make_trajectory(turn, score=score, sample=sample, prompt_id=prompt)
    made.rows[0].weight_versions = [(2, 1), (3, 2)]
    return made


def make_group(prompt: int, *answers: tuple[str, float], question: str = "What is 7 + 7?") -> TrajectoryGroup:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]
    samples = [make_trajectory(prompt, number, *answer) for number, answer in enumerate(answers)]
    return TrajectoryGroup(Prompt(prompt, "sums", chat, "14"), samples)  # type: ignore[arg-type]


def write_groups(folder: Path, step: int, groups: Sequence[TrajectoryGroup], kind: str = "step") -> None:
    log = RolloutLog(folder / "rollouts")
    log.write(step, groups, kind)
    log.close()


def update_index(root: Path) -> RunIndex:
    """Index of the runs in `root`, in the file index.sqlite beside it."""
    index = RunIndex(root, root.parent / "index.sqlite")
    with closing(index.connect()) as database:
        index.update(database)
    return index


def read_page(client: TestClient, path: str) -> str:
    """Return a page as one line."""
    response = client.get(path)
    assert response.status_code == 200, response.text
    return re.sub(r"\s+", " ", response.text)


def write_suite_results(folder: Path) -> None:
    """Write the results of a suite that has a score, and of one that failed."""
    score = SuiteScore("gsm8k", "exact_match", 0.25, 0.125, 4)
    failure = "it did not end within 9 s <b>"
    for result in (
        SuiteResult("lm-eval:gsm8k", "gsm8k", "step_20", [score]),
        SuiteResult("inspect:sums.py", "sums", "model", [], failure),
    ):
        path = folder / "suites" / result.model / result.name / "result.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(msgspec.json.encode(result))


def write_run(folder: Path, seed: int = 0, steps: int = 3, text: str = "<think>7, 7</think>14") -> Path:
    """Write a run of a few iterations: configuration, metrics, trajectories, and the trainer's values of tokens."""
    folder.mkdir(parents=True)
    config = {"actor_rollout_ref": {"model": {"path": "m"}}, "trainer": {"seed": seed, "total_training_steps": 9}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    inputs = {"actor_rollout_ref.model.path": [("m", "0a")]}
    memory = PlannedMemory("a GPU of 80 GiB", {"generate": {"engine weights": 1.0, "kv cache": 1.5}})
    data = [DataFinding("rows.jsonl", f"the column {text!r}", "not read", 3, 40)]
    settings, notices = {"iterations": "9", "reward": text}, [f"{text} has no effect."]
    write_run_plan(folder, RunPlan(settings, memory, notices, inputs, data))
    tracker = JsonlTracker(folder / "metrics.jsonl", 0)
    log = RolloutLog(folder / "rollouts")
    for step in range(1, steps + 1):
        tracker.log(step, {"critic/score/mean": step / 10 + seed, "timing/step": 1.5, "groups/mixed": 0.5})
        log.write(step, [make_group(17, (text, 1.0), ("15", 0.0))])
        trained = TrainedRow(17, 0, 0, np.array([-0.1, -0.7, -0.3], np.float32), np.full(3, 0.5, np.float32))
        log.write_trained_rows(step, [trained])
    tracker.close()
    log.close()
    return folder


def write_config(folder: Path, **sections: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))


def write_evaluation(folder: Path, text: str = "14", num_problems: int = 2) -> Path:
    """Write the evaluation of problems with two samples each; one of all samples is wrong."""
    write_config(folder, rollout={})
    questions = [f"What is 7 + 7? ({number})" for number in range(num_problems)]
    right = (text, 1.0)
    groups = [
        make_group(number, right, ("15", 0.0) if number == 1 else right, question=question)
        for number, question in enumerate(questions)
    ]
    with open_results_writer(folder / "results.jsonl", FinishedResults()) as write:
        for group in groups:
            write(group)
    results = [convert_to_sample_result(group.prompt, one) for group in groups for one in group.trajectories]
    write_report(results, [group.prompt for group in groups], folder, Terminal(file=StringIO()))
    return folder


def write_evolution(folder: Path, text: str = "14", is_complete: bool = True) -> Path:
    """Write an evolution of one problem with two rounds: a wrong solution, and a right one, which is chosen."""
    write_config(folder, models={})
    tracker = JsonlTracker(folder / "metrics.jsonl", 0)
    with Pool(folder) as pool:
        for number, (answer, votes) in enumerate((("15", 0), (text, 2))):
            position = Position(17, number, 0, 0)
            grade = Grade(Outcome.SCORED, float(number), float(number), "because")
            chat = ({"role": "user", "content": "What is 7 + 7?"}, {"role": "assistant", "content": answer})
            candidate = Candidate(position.key, position, "policy", (), chat, 1, answer, answer, answer, grade)  # type: ignore[arg-type]
            pool.append(candidate)
            verdicts = tuple(Verdict("policy", (), one < votes, f"{text} report {one}") for one in range(2))
            pool.append(Judgement(position.key, votes, 2 - votes, f"{text} of the majority", verdicts))
            tracker.log(number, compute_round_metrics(pool, [17], number))
        if is_complete:
            prompt = Prompt(17, "sums", [{"role": "user", "content": "What is 7 + 7?"}], "14")  # type: ignore[arg-type]
            write_results(pool, [prompt], folder, "", Terminal(file=StringIO()))
    tracker.close()
    return folder


def write_example_run(folder: Path, text: str = "14", is_pair: bool = False, count: int = 1) -> Path:
    """Write a fine-tuning run with examples: a prompt of two tokens, and one answer or two."""
    write_config(folder, **({"preference": {}} if is_pair else {"optim": {}}))
    texts = {(1, 2): "What is 7 + 7? ", (3, 4): f"it is {text}", (3, 5): "it is 15"}
    answers = {"chosen": [1, 2, 3, 4], "rejected": [1, 2, 3, 5]}
    rows = []
    for number, (label, ids) in enumerate(answers.items()):
        row = make_example_row(Row(ids, [0, 0, 1, 1], [0.0] * 4, [3]), lambda part: texts[tuple(part)])
        rows.append(msgspec.structs.replace(row, label=label if is_pair else "", ref_logp=-1.5 * (number + 1)))
    write_examples(folder, [LoggedExample(rows if is_pair else rows[:1], "sums")] * count)
    return folder


def write_every_kind(root: Path, text: str) -> None:
    """Write a run of each kind with samples that contain `text`; run 2 has other ones. Numbers are those of names."""
    write_run(root / "first", text=text)
    write_run(root / "second", seed=1)
    write_example_run(root / "third_sft", text)
    write_evaluation(root / "third_val", text)
    write_evolution(root / "three", text)
    write_example_run(root / "two_answers", text, is_pair=True)


def write_update_checks(folder: Path) -> None:
    """A verified update with a wrong gradient."""
    ok = Check("advantages", "grpo, prompt 1, sample 0, token 2", 2e-8, 1e-6, "stored as float32")
    wrong = Check("gradient of 8 rows", "<b>", 0.5, 1e-3, "relative")
    write_checks(folder, [ok, wrong, Check("weights", "", 0.0, 0.0, "TRPO", covered=False)])
