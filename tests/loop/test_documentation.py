"""Every command of the documentation pages runs, unless the page says why not (CONTRIBUTING.md, "Pages")."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.quickstart.make_task import make_data, make_model, make_tokenizer
from tests.loop.conftest import ROOT, run_forked
from tests.loop.page_shell import run_page
from tests.page_commands import PAGES, read_page
from tests.unit.tiny import save_model, save_scorer
from tests.unit.tool_templates import HERMES

MODEL, TRAIN, PAIRS = "Qwen/Qwen3-0.6B", "data/gsm8k/train.parquet", "data/pairs/train.parquet"
TRAINER = "alphaapollo.trainer."
NEEDED = {  # keys that `...` stands for in a command
    TRAINER + "main_ppo": {
        "actor_rollout_ref.model.path": MODEL, "data.train_files": TRAIN, "env.rollout.n": 8,
        "data.val_files": "data/gsm8k/test.parquet", "trainer.total_training_steps": 500,
    },
    TRAINER + "main_sft": {"model.path": MODEL, "data.train_files": "data/gsm8k_sft/train.parquet"},
    TRAINER + "main_dpo": {"model.path": MODEL, "data.train_files": PAIRS},
    TRAINER + "main_rm": {"model.path": MODEL, "data.train_files": PAIRS},
    TRAINER + "main_generation": {"model.path": MODEL, "data.path": TRAIN},
    "alphaapollo.evolving.main": {"models.policy.path": "outputs/model", "data.path": TRAIN},
}  # fmt: skip
PUBLISHED = {"max_position_embeddings": 40960, "model_max_length": 40960, "vocab_size": 272, "num_local_experts": 8}
LOCAL = {"trainer.controller": "local", "trainer.n_gpus_per_node": 1}
ENGINE = {"rollout.kv_cache_gib": 0.1, "rollout.cpu_threads": 1}
SAMPLES = {"data.max_samples": 2, "data.max_response_length": 16}
GENERATION = LOCAL | ENGINE | SAMPLES
GRADED = {"data.max_samples": 8, "data.max_response_length": 64, "custom_reward_function.path": "reward.py"}
ONE_ROUND = ENGINE | SAMPLES | {"evolving.rounds": 1}
TUNING = {"data.train_batch_size": 2, "trainer.total_training_steps": 100, "trainer.cpu_threads": 1}
PPO = LOCAL | {
    "data.train_batch_size": 2, "data.max_response_length": 16, "env.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "actor_rollout_ref.rollout.kv_cache_gib": 0.1,
    "actor_rollout_ref.rollout.cpu_threads": 1, "trainer.cpu_threads": 1,
    "trainer.total_training_steps": 2, "trainer.save_freq": 2,
}  # fmt: skip
RECORDED_RUN = {
    "algorithm.adv_estimator": "grpo", "custom_reward_function.path": "reward.py", "trainer.record_steps": "[2]",
    "trainer.project_name": "quickstart", "trainer.experiment_name": "grpo",
}  # fmt: skip
LINKS = {  # other names of the recorded run and of its second step
    "quickstart/grpo/checkpoints/step_000020": "step_000002",
    "quickstart/grpo/recorded/step_000412": "step_000002",
    "quickstart/grpo/rollouts/step_000040.jsonl": "step_000002.jsonl",
    "PROJECT/EXPERIMENT": "../quickstart/grpo",
    "alphaapollo/default": "../quickstart/grpo",
    "alphaapollo/first": "../quickstart/grpo",
}
FULL_RUNS = {  # the first command of each program is run to its end with these sizes
    "README.md": {TRAINER + "main_ppo": PPO, TRAINER + "main_generation": GENERATION},
    "docs/start.md": {TRAINER + "main_ppo": PPO},
    "docs/preferences.md": {TRAINER + "main_dpo": TUNING, TRAINER + "main_rm": TUNING},
    "docs/sft.md": {TRAINER + "main_sft": TUNING, TRAINER + "main_generation": GENERATION | GRADED},
    "examples/gsm8k/README.md": {TRAINER + "main_sft": TUNING | {"trainer.total_training_steps": 2}},
    "docs/evaluation.md": {TRAINER + "main_generation": GENERATION},
    "docs/evolving.md": {"alphaapollo.evolving.main": ONE_ROUND | {"custom_reward_function.path": "reward.py"}},
}


VERL_SCRIPT = f"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=32 \\
    actor_rollout_ref.model.path={MODEL} actor_rollout_ref.rollout.name=${{ENGINE:-vllm}} \\
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=32 "$@"
"""
OPENRLHF_SCRIPT = f"""deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path {MODEL} \\
    --data.dataset train.parquet --data.input_key prompt --data.output_key response --train.batch_size 16
"""
SWIFT_SCRIPT = f"""NPROC_PER_NODE=1 swift sft --model {MODEL} --tuner_type full --dataset train.parquet \\
    --max_length 1024 --per_device_train_batch_size 1 --gradient_accumulation_steps 16 --learning_rate 1e-5
"""


def make_row(number: int) -> dict[str, Any]:
    """Row with the columns that all programs read: question, chat, pair, graded answer."""
    question, answer = f"What is {number} + 4?", str(number + 4)
    user = {"role": "user", "content": question}
    return {
        "question": question, "answer": f"{number} + 4 = {answer}\n#### {answer}", "data_source": "openai/gsm8k",
        "prompt": [user], "messages": [user, {"role": "assistant", "content": answer}], "chosen": answer,
        "rejected": "0", "reward_model": {"style": "rule", "ground_truth": answer}, "ground_truth": answer,
        "response": f"\\boxed{{{answer}}}", "is_correct": True, "extra_info": {"length_budget": 16},
    }  # fmt: skip


def make_files(folder: Path) -> None:
    """Write the data files that pages name."""
    table = pa.Table.from_pylist([make_row(number) for number in range(120)])
    lines = "".join(f"{json.dumps(row)}\n" for row in table.to_pylist())
    for name, split in product(("gsm8k", "gsm8k_sft", "pairs"), ("train", "test")):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / f"data/{name}/{split}.parquet")
    for name in ("train", "test", "problems", "chats", "pairs", "maths", "code", "val_maths", "val_code"):
        pq.write_table(table, folder / f"{name}.parquet")
    for name in ("problems", "solutions", "outputs", "labelled"):
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "FOLDER" / "sympy").mkdir(parents=True)
    (folder / "FOLDER" / "sympy" / "ode.md").write_text("To solve a differential equation, call dsolve.")
    for split in ("train", "test"):
        (folder / f"FOLDER/gsm8k_{split}.jsonl").write_text(lines)
    (folder / "FILE...").write_text("print(6 * 7)")
    (folder / "reward.py").write_text(
        "def compute_score(prompt, completion):\n    return {'reward': len(completion) / 100, 'accuracy': 1.0}\n"
    )
    (folder / "run_grpo.sh").write_text(VERL_SCRIPT)
    (folder / "run_openrlhf.sh").write_text(OPENRLHF_SCRIPT)
    (folder / "run_swift.sh").write_text(SWIFT_SCRIPT)


def make_hub(home: Path) -> None:
    """Write the models and the dataset that pages name to the cache of the hub, as small ones."""
    dense = (MODEL, "Qwen/Qwen3-8B", "Qwen/Qwen3-14B")
    for name in (*dense, "Qwen/Qwen3-30B-A3B", "Skywork/Skywork-Reward-V2-Qwen3-0.6B"):
        cache = home / "hub" / f"models--{name.replace('/', '--')}"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("0")
        model = cache / "snapshots" / "0"
        if "A3B" in name:
            save_model("qwen3_moe", model)
        if "Reward" in name:
            save_scorer("qwen3", model)
        make_tokenizer(model)
        if name in dense:
            make_model(model, seed=0)
        (model / "chat_template.jinja").write_text(HERMES)
        for file in model.glob("*config.json"):
            values = json.loads(file.read_text())
            file.write_text(json.dumps(values | {key: value for key, value in PUBLISHED.items() if key in values}))
        if name not in dense:  # dry runs only, whose config.json has other sizes now
            (model / "model.safetensors").unlink()
    folder = home / "datasets" / "openai___gsm8k" / "main" / "0.0.0" / "0"
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist([make_row(number) for number in range(40)]).select(["question", "answer"])
    for split in ("train", "test"):
        path = str(folder / f"gsm8k-{split}.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    splits = {split: {"name": split, "num_examples": len(table)} for split in ("train", "test")}
    (folder / "dataset_info.json").write_text(json.dumps({"config_name": "main", "splits": splits}))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working folder of a reader: the repository, data files, and a finished run."""
    folder = tmp_path_factory.mktemp("prepared")
    make_hub(Path(os.environ["HF_HOME"]))
    make_files(folder)
    for path in ROOT.iterdir():
        if path.name[0] != "." and path.name not in ("outputs", "data"):
            (folder / path.name).symlink_to(path)
    words = NEEDED[TRAINER + "main_ppo"] | PPO | RECORDED_RUN
    run_forked(TRAINER + "main_ppo", [f"{key}={value}" for key, value in words.items()], folder / "run.txt", folder)
    for name, target in LINKS.items():
        (folder / "outputs" / name).parent.mkdir(exist_ok=True)
        (folder / "outputs" / name).symlink_to(target)
    model = next(Path(os.environ["HF_HOME"]).glob("hub/models--Qwen--Qwen3-0.6B/snapshots/*"))
    (folder / "outputs" / "model").symlink_to(model)
    make_tokenizer(folder / "outputs/quickstart/sft/model")
    make_model(folder / "outputs/quickstart/sft/model", seed=0)
    make_data(folder / "outputs/quickstart/data", seed=0, num_sft=8, num_rl=8, num_val=8)
    return folder


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(prepared, tmp_path / "work", symlinks=True)
    yield tmp_path / "work"
    shutil.rmtree(tmp_path / "work")  # models and checkpoints of every page would fill the disk


def page_case(page: Path) -> Any:
    """Case of a page. `make test` runs one of them."""
    name = str(page.relative_to(ROOT))
    return pytest.param(page, id=name, marks=[pytest.mark.core] * (name == "docs/start.md"))


@pytest.mark.parametrize("page", [page_case(page) for page in PAGES])
def test_commands_of_the_page_run(page: Path, workplace: Path) -> None:
    name = str(page.relative_to(ROOT))
    blocks, _ = read_page(page.read_text(encoding="utf-8"))
    if name in FULL_RUNS:  # their commands make the runs that the page reads
        shutil.rmtree(workplace / "outputs" / "alphaapollo")
    failures = run_page(blocks, workplace, NEEDED, FULL_RUNS.get(name, {}))
    assert not failures, "\n\n".join(f"{name}:{failure}" for failure in failures)


BROKEN = """
    cat pyproject.toml
    cat nowhere.toml

Text

    eval "$(alphaapollo completion tcsh)"

Text

    algorithm.gama=1

```console
$ alphaapollo explain algorithm.gamma
algorithm.gamma: accepted ... token
$ alphaapollo explain algorithm.lam
algorithm.gamma: unknown
```
"""


def test_failures_are_found(prepared: Path, tmp_path: Path) -> None:
    blocks, problems = read_page(BROKEN)
    assert problems == []
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    missing, inner, key, output = run_page(blocks, tmp_path, NEEDED, {})
    assert missing.startswith("3: exit code 1") and "nowhere.toml: No such file" in missing
    assert inner.startswith("7: exit code 0") and "completion tcsh: exit code 2" in inner
    assert key.startswith("11: exit code 2") and "Did you mean 'algorithm.gamma'" in key and "not run: REASON" in key
    assert output.startswith("14: the page shows other output")
