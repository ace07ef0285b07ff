from __future__ import annotations

import json
import shlex
from pathlib import Path

import pandas as pd
import pytest

from alphaapollo.cli.main import main
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config, save_config
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.observability.terminal import Terminal
from alphaapollo.plugins.sweeps.command import make_folder_name, make_runs, make_runs_of_only_command, train_and_compare
from alphaapollo.plugins.sweeps.queue import RunQueue, SweptRun, count_gpus
from alphaapollo.plugins.sweeps.table import rank_settings, read_mean_curve
from alphaapollo.runs.command_history import CommandRecord
from alphaapollo.runs.record_files import write_records
from alphaapollo.runs.run_plan import RunPlan, write_run_plan


def test_a_run_for_each_combination_with_a_label_of_its_values() -> None:
    runs = make_runs("rl", ["actor_rollout_ref.actor.optim.lr=1e-5,3e-5", "trainer.seed=range(2)", "env.rollout.n=8"])
    assert [run.name for run in runs] == [f"lr={lr}_seed={seed}" for lr in ("1e-05", "3e-05") for seed in (0, 1)]
    assert [run.setting for run in runs] == ["lr=1e-05", "lr=1e-05", "lr=3e-05", "lr=3e-05"]
    assert runs[3].folder == Path("outputs/sweep_default/lr=3e-05_seed=1")
    for run in runs:
        assert run.module == "alphaapollo.trainer.main_ppo"
        assert load_config(Config, "ppo", run.words) == run.config  # the process gets the same values
    assert runs[2].config.actor_rollout_ref.actor.optim.lr == 3e-5 and runs[2].config.env.rollout.n == 8


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("algorithm=grpo,dapo trainer.project_name=own", ["own/algorithm=grpo", "own/algorithm=dapo"]),
        ("env.rollout.n=2,4 trainer.experiment_name=x", ["sweep_x/n=2", "sweep_x/n=4"]),
        ("data.train_files=[a/b],[c,d]", ["sweep_default/train_files=-a-b-", "sweep_default/train_files=-c-d-"]),
        (
            "critic.optim.lr=choice(1,0.5) actor_rollout_ref.actor.optim.lr=1,1e-3",
            [f"sweep_default/critic.optim.lr={c}_actor.optim.lr={a}" for c in (1, 0.5) for a in (1, 0.001)],
        ),
    ],
)
def test_names_of_folders(words: str, names: list[str]) -> None:
    assert [str(run.folder) for run in make_runs("rl", words.split())] == [f"outputs/{name}" for name in names]


def test_long_names_stay_different_and_are_names_of_folders() -> None:
    names = [make_folder_name(f"path={'x' * 200}/{end}") for end in "ab"]
    assert len({*names}) == 2 and max(map(len, names)) < 200


def test_the_command_is_found_by_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(load_config(SftConfig, "sft", ["trainer.experiment_name=warm", "model.path=m"]), file)
    (first, _) = make_runs_of_only_command([f"--config={file}", "optim.lr=1e-5,2e-5"])
    assert first.module.endswith("main_sft") and str(first.folder) == "outputs/sweep_warm/lr=1e-05"
    file.write_text("model: {path: m}\n")
    with pytest.raises(ConfigError, match=r"keys are those of sft, dpo, rm.*sweep dpo"):
        make_runs_of_only_command([f"--config={file}", "optim.lr=1e-5,2e-5"])
    with pytest.raises(ConfigError, match=r"optim\.lrr"):
        make_runs_of_only_command([f"--config={file}", "optim.lrr=1e-5,2e-5"])


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("sweep sft optim.lr=1e-5", "no key has several values"),
        ("sweep sft trainer.experiment_name=a,b", "trainer.experiment_name has several values"),
        ("sweep sft optim.lr=1e-5,x", 'optim.lr: expected number > 0.0 and <= 1.0, got "x"'),
        ("sweep optim.lr=1,2", "a sweep needs rl, sft, dpo, rm, distill or a YAML file"),
        ("sweep sft optim.lr=0.1,0.1 model.path=org/name", "two runs have the same folder"),
        ("sweep sft optim.lr=0.1,0.2 trainer.resume_mode=disable model.path=org/name", "a sweep resumes its runs"),
        ("sweep sft optim.lr=0.1,0.2 model.path=org/name --stop-worst-half-at 0", "must be positive"),
        ("sweep sft optim.lr=0.1,0.2 model.path=org/name --figure a.jpg", "a.jpg must end in .png, .svg or .pdf"),
        ("sft -m optim.lr=1e-5,2e-5", "alphaapollo sweep sft optim.lr=1e-5,2e-5"),
        ("distill optim.lr=1,2 --multirun", "alphaapollo sweep rl algorithm=distill optim.lr=1,2"),
    ],
)
def test_what_cannot_be_swept_is_an_error_before_the_start(
    words: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").touch()
    data = ["data.train_files=train.parquet", "trainer.device=cpu"] if words.startswith("sweep sft") else []
    try:
        code: object = main([*words.split(), *data])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and fact in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["train.parquet"]


def write_metrics(folder: Path, metric: str, values: list[float]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, metric: value}) for step, value in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_means_over_seeds_and_their_order(tmp_path: Path) -> None:
    losses = {"worse": [3.0, 3.0], "equal": [2.0, 2.0], "first of equals": [2.0, 2.0], "lower": [1.0, 9.0]}
    curves = {
        name: read_mean_curve("val/loss", [write_metrics(tmp_path / f"{name}{seed}", "val/loss", values)] * 2, seed)
        for name, values in losses.items()
        for seed in (1, 2)
    }
    curves["none"] = read_mean_curve("val/loss", [tmp_path / "gone"])
    assert rank_settings(curves, "val/loss") == ["equal", "first of equals", "worse", "lower", "none"]
    seeds = [write_metrics(tmp_path / str(value), "train/margin", [0.0, value]) for value in (1.0, 3.0)]
    mean = read_mean_curve("train/margin", seeds)
    assert mean.values.tolist() == [0, 2]
    assert mean.band[1, 1:] == pytest.approx([2 - 12.706, 2 + 12.706], abs=1e-3)  # t with one degree of freedom


class MockQueue(RunQueue):
    """Queue whose runs only write metrics: an accuracy that grows with the learning rate, the seed and the step."""

    def train(self, runs: list[SweptRun], more_words: list[str]) -> dict[str, str]:  # type: ignore[override]
        started.append((sorted(run.name for run in runs), more_words))
        for run in runs:
            assert isinstance(run.config, SftConfig)
            value = run.config.optim.lr + run.config.data.seed / 100
            write_metrics(run.folder, "val/accuracy", [value, 2 * value, 3 * value][: 2 if more_words else 3])
        return {run.name: "out of memory" for run in runs if run.name == "lr=0.2_seed=0"}


started: list[tuple[list[str], list[str]]] = []


def test_only_the_better_half_of_the_settings_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    started.clear()
    runs = make_runs("sft", ["optim.lr=0.1,0.2,0.3", "data.seed=0,1"])
    files = [tmp_path / "papers" / name for name in ("curve.pdf", "table.tex")]
    code = train_and_compare(MockQueue([], 1, Terminal(width=200)), runs, 2, None, *files)
    assert code == 1  # a run failed
    assert started[0] == (sorted(run.name for run in runs), ["trainer.stop_at_step=2"])
    assert started[1] == (["lr=0.2_seed=1", "lr=0.3_seed=0", "lr=0.3_seed=1"], [])
    shown, table = capsys.readouterr().out, pd.read_csv("outputs/sweep_sft/sweep.csv")
    assert "the better half by val/accuracy continues: lr=0.3, lr=0.2" in shown and "stopped at step 2" in shown
    assert table["setting"].tolist() == ["lr=0.3", "lr=0.2", "lr=0.1"]
    assert table["val/accuracy"].tolist() == pytest.approx([0.915, 0.63, 0.21])
    assert table["low"].isna().tolist() == [False, True, False]  # one seed of the second setting failed
    assert table["state"].tolist() == ["finished", "failed: lr=0.2_seed=0: out of memory", "stopped at step 2"]
    assert Path("outputs/sweep_sft/sweep.png").stat().st_size > 10_000
    assert "best setting: lr=0.3, val/accuracy 0.915 (0.724 to 1) as the mean of 2 runs; " in shown
    assert "its best run: lr=0.3_seed=1 (0.93), without a model" in shown
    values = pd.read_csv("outputs/sweep_sft/sweep_runs.csv")  # a row per run and metric
    assert values.iloc[1].tolist() == ["lr=0.3", "lr=0.3_seed=1", "val/accuracy", 3, pytest.approx(0.93)]
    assert len(values) == 5 and files[0].read_bytes().startswith(b"%PDF")
    assert r"lr=0.3 & 0.915 & [0.7244, 1] & 3 & 2 \\" in files[1].read_text() and r"95 \%" in files[1].read_text()


def test_a_run_is_complete_if_the_same_words_settings_and_inputs_have_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own.yaml"
    file.write_text("grad_clip: 2.0\n")
    words = [f"--config={file}", "optim.lr=0.1,0.2"]
    run = make_runs("sft", words)[0]
    assert not run.is_complete([])
    save_config(run.config, run.folder / "config.yaml")
    write_run_plan(run.folder, RunPlan({}))

    def finish(*more: str, state: str = "finished") -> None:
        command = ["python", "-m", "alphaapollo.run_process", "1", run.module, *run.words, *more]
        write_records(run.folder / "history.jsonl", [CommandRecord(shlex.join(command), 0, 1, state, "", {})])

    finish(state="interrupted")
    assert not run.is_complete([])
    finish("trainer.stop_at_step=2")
    assert run.is_complete(["trainer.stop_at_step=2"]) and not run.is_complete([])
    finish()
    assert run.is_complete(["trainer.stop_at_step=2"]) and run.is_complete([])
    file.write_text("grad_clip: 3.0\n")
    assert not make_runs("sft", words)[0].is_complete([])
    write_run_plan(run.folder, RunPlan({}, inputs={"data.train_files": [("a.parquet", "digest")]}))
    assert not run.is_complete([])


PROGRAM = """
import os, pathlib, sys, time

def main(words):
    if "train_batch_size=3" in words[0]:
        print("error: the disk is full")
        return 1
    folder = pathlib.Path(__file__).parent
    mine = [folder / f"gpu{number}" for number in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    for file in mine:
        file.touch(exist_ok=False)  # fails if another run uses the GPU
    time.sleep(0.3)
    for file in mine:
        file.unlink()
    print("done")
    return 0
"""


def test_runs_share_the_gpus_and_a_failed_run_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program_of_test_sweep.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    gpus = ["trainer.device=cuda", "trainer.n_gpus_per_node=2"]
    runs = [
        SweptRun("program_of_test_sweep", run.words, run.setting, run.config)
        for run in make_runs("sft", ["data.train_batch_size=1,2,3,4", *gpus])
    ]
    errors = RunQueue(["0", "1", "2", "4"], 4, Terminal()).train(runs, [])
    assert errors == {"train_batch_size=3": "the disk is full"}
    shown = capsys.readouterr().out
    assert shown.count(": finished after 0:0") == 3 and "logs/train_batch_size=3.log" in shown


def test_number_of_gpus_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(*words: str, num_gpus: int = 8) -> int:
        return count_gpus(load_config(Config, "ppo", ["trainer.n_gpus_per_node=2", *words]), num_gpus)

    engines = ("actor_rollout_ref.rollout.colocate=false", "actor_rollout_ref.rollout.num_engines=3")
    assert count() == 2 and count(num_gpus=0) == 0 and count(*engines) == 5
    assert count(*engines, "actor_rollout_ref.rollout.tensor_model_parallel_size=2") == 8
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert count() == 0 and count("trainer.controller=local", "trainer.n_gpus_per_node=1") == 1
