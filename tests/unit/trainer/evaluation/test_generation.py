"""main_generation on the fake engine in this process: output, resume, bad input."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from alphaapollo.config.schema import GenerationConfig
from alphaapollo.controller import launcher
from alphaapollo.controller.errors import RunStalled
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.processes.watchdog import RUN
from alphaapollo.trainer.evaluation import generation
from alphaapollo.trainer.main_generation import main
from tests.builders import write_rows
from tests.unit.environments.episode_helpers import EXAMPLES
from tests.unit.trainer.evaluation.small_run import SmallRun, save_chat_model

REWARD = '''
def compute_score(prompt, completion):
    """Rewards even words; fails on long answers to prompts with the ground truth "fails"."""
    words = completion.split()
    if prompt.ground_truth == "fails" and len(words) > 8:
        raise RuntimeError("too long for me")
    even = sum(int(word[1:]) % 2 == 0 for word in words if word[1:].isdigit())
    return {"reward": even / 16, "accuracy": float(even > len(words) / 2)}
'''
TRUTH = {"reward_model": {"style": "rule", "ground_truth": "x"}}
ROWS = [{"data_source": f"source/{index % 2}", "prompt": f"w{index} w3 w{index + 2}", **TRUTH} for index in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"), split_at_spaces=True)


class Command(SmallRun):
    def __init__(self, model: Path, folder: Path):
        self.files = folder
        (folder / "reward.py").write_text(REWARD)
        defaults = {
            "data.path": write_rows(folder / "rows.parquet", ROWS),
            "data.n_samples": 3,
            "data.max_response_length": 12,
            "model.path": model,
            "rollout.name": "fake",
            "custom_reward_function.path": folder / "reward.py",
            "trainer.controller": "local",
        }
        super().__init__(generation, GenerationConfig, "generation", folder, defaults)
        self.results = self.folder / "results.jsonl"

    def records(self) -> list[dict]:
        """Results in order of prompt and sample, without values that differ between runs."""
        records = [json.loads(line) for line in self.results.read_bytes().splitlines()]
        for record in records:
            del record["seconds"]
        return sorted(records, key=lambda record: (record["prompt_id"], record["sample"]))

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv(RUN, "")  # generation sets it: back to what it was afterwards
    monkeypatch.setattr(launcher, "start_reaper", lambda *_: None)  # this process is not the run's own
    return Command(model, tmp_path)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds of the requested completions."""
    seeds: list[int] = []
    generate = FakeEngine.generate

    async def noted(self: FakeEngine, token_ids, sampling, request_id, images=()):
        seeds.append(sampling.seed)
        return await generate(self, token_ids, sampling, request_id)

    monkeypatch.setattr(FakeEngine, "generate", noted)
    return seeds


def test_every_sample_is_written_and_counted(command: Command) -> None:
    printed = command.run()
    records = command.records()
    samples = [(record["prompt_id"], record["sample"]) for record in records]
    assert samples == [(prompt, sample) for prompt in range(6) for sample in range(3)]
    assert {"turns", "rows", "reward", "components", "outcome", "end", "stop_reason", "text"} <= records[0].keys()
    assert len({record["text"] for record in records}) == 18, "every sample has draws of its own"
    files = {"config.yaml", "plan.json", "results.jsonl", "summary.csv", "summary.json"}
    assert files <= {path.name for path in command.folder.iterdir()}
    summary = command.summary()
    assert list(summary["by_data_source"]) == ["source/0", "source/1"]
    accuracy = sum(record["components"]["accuracy"] for record in records) / 18
    assert summary["all"]["figures"]["avg@3"]["value"] == pytest.approx(accuracy)
    assert {"pass@1", "pass@2", "pass@3", "maj@3"} <= summary["all"]["figures"].keys()
    rows = list(csv.DictReader((command.folder / "summary.csv").read_text().splitlines()))
    assert len(rows) == 3 * 7 and rows[-1]["data_source"] == "all"
    assert "avg@3" in printed and "all: 18 samples of 6 problems; 18 scored" in printed


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (lambda lines: [*lines[:9], lines[9][: len(lines[9]) // 2]], 3),
        (lambda lines: lines[:10], 3),
        (lambda lines: [*lines[:11], lines[11].rstrip("\n")], 3),
        (lambda lines: [*lines[:3], "\0" * 40 + "\n", *lines[4:9]], 2),
        (lambda lines: [*lines[:9], *lines[3:6]], 3),
        (lambda lines: [], 0),
    ],
    ids=["in a line", "in a group", "before a line ends", "damaged", "a group twice", "empty"],
)
def test_killed_run_resumes_with_the_same_result(
    command: Command, played: list[int], cut: Callable[[list[str]], list[str]], kept: int
) -> None:
    command.run()
    whole, summary, seeds = command.records(), command.summary(), set(played)
    command.results.write_text("".join(cut(command.results.read_text().splitlines(keepends=True))))
    played.clear()
    printed = command.run()
    assert len(played) == 3 * (6 - kept), "finished prompts are not repeated"
    assert set(played) < seeds or kept == 0
    assert f"finished  {kept} prompts" in printed
    assert command.records() == whole
    assert command.summary() == summary


def test_a_finished_run_starts_no_engine(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command.run()
    summary = command.summary()
    (command.folder / "summary.json").unlink()
    monkeypatch.setattr(generation, "open_workers", None)
    assert "finished  6 prompts" in command.run()
    assert command.summary() == summary


def test_failures_are_counted_and_excluded(command: Command) -> None:
    rows = [{**row, "reward_model": {"ground_truth": "fails"}} for row in ROWS[:2]] + ROWS[2:]
    write_rows(command.files / "rows.parquet", rows)
    printed = command.run("data.max_response_length=16")
    failed = [record for record in command.records() if record["outcome"] == "grader_failed"]
    scored = [record for record in command.records() if record["outcome"] == "scored"]
    assert failed and {record["prompt_id"] for record in failed} <= {0, 1} and len(failed) + len(scored) == 18
    assert all(record["reward"] is None for record in failed)
    everything = command.summary()["all"]
    assert everything["failed"] == len(failed) and everything["outcomes"]["grader_failed"] == len(failed)
    by_prompt = [[r["components"]["accuracy"] for r in scored if r["prompt_id"] == prompt] for prompt in range(6)]
    means = [sum(own) / len(own) for own in by_prompt if own]
    assert everything["figures"]["avg@3"]["value"] == pytest.approx(sum(means) / len(means))
    assert f"note: {len(failed)} samples failed" in printed and "too long for me" in printed


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.temperature=0.5"], r"rollout\.temperature=1\.0 \(now 0\.5\)"),
        (["data.n_samples=4"], r"data\.n_samples=3 \(now 4\)"),
        (["trainer.seed=1", "env.max_steps=2"], r"env\.max_steps=1 \(now 2\), trainer\.seed=0 \(now 1\)"),
    ],
)
def test_other_settings_do_not_go_on_with_old_results(command: Command, overrides: list[str], says: str) -> None:
    command.run()
    before = command.results.read_bytes()
    with pytest.raises(ValueError, match=says + r".*Set another trainer\.experiment_name"):
        command.run(*overrides)
    assert command.results.read_bytes() == before


def test_speed_keys_may_change_and_data_may_not(command: Command) -> None:
    command.run()
    command.run("rollout.max_num_seqs=8", "reward.num_workers=2", "trainer.start_timeout=9")
    write_rows(command.files / "rows.parquet", [{**row, "prompt": "w9 w9"} for row in ROWS])
    with pytest.raises(ValueError, match=r"prompt \d .*row \d of data\.path"):
        command.run()


def test_start_from_scratch_keeps_the_previous_run(command: Command) -> None:
    command.run()
    printed = command.run("trainer.resume_mode=disable", "trainer.seed=1")
    assert "the previous run of this name was moved to" in printed and "finished  0 prompts" in printed
    assert (command.folder.with_name("run.1") / "results.jsonl").exists()
    assert command.records()[0]["step"] == 0


def test_the_draws_are_those_of_a_validation_and_greedy_has_none(command: Command, played: list[int]) -> None:
    from alphaapollo.utils.seeds import derive_seed

    command.run("rollout.temperature=0", "trainer.seed=7")
    samples = [(prompt, sample) for prompt in range(6) for sample in range(3)]
    assert set(played) == {derive_seed(7, "validate", 0, *sample, 0) for sample in samples}


def test_episodes_of_several_turns_without_a_reward_function(command: Command) -> None:
    module = EXAMPLES / "guessing_game" / "environment.py"
    game = ("env.env_name=guessing_game", f"env.custom_module={module}", "env.max_steps=3")
    game += ("custom_reward_function.path=",)
    command.run(*game, "data.max_response_length=99")
    records = command.records()
    assert len(records) == 18 and max(len(record["turns"]) for record in records) > 1
    everything = command.summary()["all"]
    assert everything["failed"] == 0 and sum(everything["ends"].values()) == 18
    tokens = sum(turn["num_tokens"] for record in records for turn in record["turns"])
    assert everything["figures"]["response_length"]["value"] == pytest.approx(tokens / 18)
    assert {record["prompt"][0]["content"][:20] for record in records} == {"I have chosen a whol"}
    assert [record["row_prompt"] for record in records[::3]] == [row["prompt"] for row in ROWS]
    assert "finished  6 prompts" in command.run(*game, "data.max_response_length=99")  # whatever was asked: its rows


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.path=/no/such/rows.parquet"], "no such file: /no/such/rows.parquet"),
        (["data.path="], "data.path is required"),
        (["custom_reward_function.path="], "data_source 'source/0'"),
        (["data.prompt_key=question"], "no column 'question'"),
        (["data.max_prompt_length=2"], "longer than data.max_prompt_length=2"),
        (["rollout.name=vllm"], "data.max_response_length = 524"),
        (["trainer.device=cuda"], "this machine has no GPU"),
        (["actor_rollout_ref.rollout.temperature=1"], "renamed to rollout.temperature"),
        (["data.n_sample=2"], "Did you mean 'data.n_samples'"),
    ],
)
def test_refused_before_anything_starts(
    command: Command,
    overrides: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    try:
        code = main(command.words(*overrides))
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert code == 2 and says in error, error
    assert not (command.files / "out").exists(), "nothing is written"


def test_an_engine_that_does_nothing_ends_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgotten(self: FakeEngine, token_ids, sampling, request_id, images=()):
        await asyncio.sleep(1000)

    monkeypatch.setattr(FakeEngine, "generate", forgotten)
    with pytest.raises(RunStalled, match=r"generate_group .*rollout 0 .*/run\.$"):
        command.run("trainer.stall_timeout=1")
    (stacks,) = (command.folder / "stalls").iterdir()
    assert "x generate" in stacks.read_text()
