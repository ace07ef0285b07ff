"""The command line and the Python API on complete runs: Python objects, Ctrl-C, export, chat, serve."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaapollo import api
from alphaapollo.algorithms.advantages import AdvantageInputs, Advantages
from alphaapollo.cli.main import SUBCOMMANDS
from alphaapollo.config.keys import merge_maps, nest_value
from alphaapollo.config.schema import Algorithm
from alphaapollo.processes.network import find_free_port
from alphaapollo.runs.checkpoint_folder import write_manifest
from alphaapollo.types import Prompt
from alphaapollo.utils.plugins import is_available
from tests.loop.conftest import DEADLINE, MARK, ROOT, Runner, wait_until_nothing_is_left
from tests.loop.warm import Program

SIZES = ("rollout.kv_cache_gib=0.1", "rollout.cpu_threads=1")


def digits(prompt: Prompt, completion: str) -> dict[str, float]:
    found = sum(letter.isdigit() for letter in completion)
    return {"reward": found / 10, "accuracy": float(found % 2)}


def identity_advantages(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    values = inputs.mask * inputs.scores.unsqueeze(1)
    return Advantages(values, values)


def settings(ppo: Runner, **more: Any) -> dict[str, Any]:
    """Settings for one process and the fake engine, without a reward file."""
    left_out = ("custom_reward_function.path", "algorithm.adv_estimator", "data.val_files")
    sizes = {key: value for key, value in ppo.sizes("run").items() if key not in left_out}
    quick = {"trainer.controller": "local", "actor_rollout_ref.rollout.name": "fake", "trainer.save_freq": 1}
    return sizes | quick | more


def start(ppo: Runner, words: list[object], typed: str = "") -> Program:
    """Start a command of alphaapollo, forked from the warm process, with a text as its input."""
    output = ppo.out / f"output_{len(ppo.programs)}.txt"
    environment = os.environ | {MARK: str(ppo.out)}
    ppo.programs.append(Program("alphaapollo.cli.main", words, output, environment, ROOT, warm=True, typed=typed))
    return ppo.programs[-1]


@pytest.mark.core
def test_python_objects_then_export_and_chat(ppo: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(ppo.out))
    steps: list[int] = []

    async def cell() -> Any:
        return api.rl(
            settings(ppo, **{"trainer.export_hf": False}),
            reward=digits,
            estimator=identity_advantages,
            on_iteration=lambda step, metrics: steps.append(step),
        )

    run = asyncio.run(cell())
    assert steps == [0, 1, 2] or steps == [1, 2]
    assert run.metrics["critic/score/mean"].loc[1:].notna().all()
    assert run.config.algorithm.adv_estimator == "identity_advantages"
    model = run.model  # the newest checkpoint, exported and verified
    assert model == run.folder / "exported/step_000002"
    card = (model / "README.md").read_text()
    assert "| `identity_advantages` |" in card
    assert "Plain transformers loads this folder" in card
    if is_available("commands", "chat"):
        done = ppo.finish(start(ppo, ["chat", run.folder, "data.max_response_length=8"], "hello\nagain\n"))
        assert done.code == 0 and done.output.count("> ") >= 3, done.output
    wait_until_nothing_is_left(ppo)


SCRIPT = """
import signal

from alphaapollo import rl

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run with SIGINT ignored

def digits(prompt, completion):
    return float(len(completion))

def print_step(step, metrics):
    print("iteration", step, flush=True)

if __name__ == "__main__":
    rl({settings!r}, reward=digits, on_iteration=print_step)
"""


def test_ctrl_c_in_a_script_leaves_no_process(ppo: Runner) -> None:
    long = settings(ppo, **{"trainer.total_training_steps": 100_000, "trainer.save_freq": -1})
    script = ppo.out / "script.py"
    script.write_text(
        SCRIPT.format(settings={key: str(value) if isinstance(value, Path) else value for key, value in long.items()})
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=os.environ | {MARK: str(ppo.out), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("iteration 2"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait(DEADLINE) != 0
    assert "KeyboardInterrupt" in rest
    wait_until_nothing_is_left(ppo)


def test_serve(ppo: Runner) -> None:
    port = find_free_port()
    url = f"http://127.0.0.1:{port}/v1"
    server = start(ppo, ["serve", ppo.task.model, "--port", port, "--name", "tiny", *SIZES])
    end = time.monotonic() + DEADLINE
    while not (_answers(f"{url}/models") and "vllm chat --url" in server.printed):
        assert server.wait(0.2) is None and time.monotonic() < end, server.printed[-4000:]
    body = {"model": "tiny", "prompt": "1+2=", "stream": True, "ignore_eos": True, "max_tokens": 400}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE) as stream:  # a client that does not read the rest
        assert stream.readline().startswith(b"data:")
        assert "stop with Ctrl-C" in server.printed
        server.signal(signal.SIGINT)
        assert ppo.finish(server).code == 130
    wait_until_nothing_is_left(ppo)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(json.load(answer)["data"])
    except OSError:
        return False


PLANTED = "import os\nopen(os.environ['PLANTED'], 'a').write(__file__ + '\\n')\n"
CODE_KEYS: dict[str, Any] = {
    "env.custom_module": "planted.py",
    "env.agent": {"command": "touch $PLANTED"},
    "env.mcp_servers": {"files": {"command": ["sh", "-c", "touch $PLANTED"]}},
    "algorithm.custom_module": "planted.py",
    "reward.custom_module": "planted.py",
    "custom_reward_function.path": "planted.py",
    "actor_rollout_ref.model.trust_remote_code": True,
    "actor_rollout_ref.rollout.engine_kwargs.vllm": {"logits_processors": ["planted:Processor"]},
}


def plant_code(run: Path, base: Path, folder: Path) -> None:
    """Make a folder of files that another user may have written: the run, its model, an adapter, a data set, and the
    modules of a working directory. All of them name code."""
    shutil.move(run, folder / "run")
    for place in (folder / "run", folder / "run/recorded/step_000001"):
        values = yaml.safe_load((place / "config.yaml").read_text())
        for key, value in CODE_KEYS.items():
            merge_maps(values, nest_value(key, value))
        merge_maps(values, nest_value("actor_rollout_ref.model.path", str(folder / "model")))
        (place / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "run/recorded/step_000001/manifest.json").unlink()
    write_manifest(folder / "run/recorded/step_000001")
    for name in ("model", "run/model"):
        model = folder / name
        shutil.copytree(base, model, dirs_exist_ok=True)
        (model / "planted.py").write_text(PLANTED)
        for file in ("config.json", "tokenizer_config.json"):
            autos = {
                "AutoConfig": "planted.C",
                "AutoModelForCausalLM": "planted.M",
                "AutoTokenizer": ["planted.T", None],
            }
            values = json.loads((model / file).read_text()) | {"auto_map": autos, "model_type": "planted"}
            (model / file).write_text(json.dumps(values))
    (folder / "adapter").mkdir()
    megatron = {"megatron_config": {"a": 1}, "megatron_core": "planted", "auto_mapping": {"parent_library": "planted"}}
    adapter = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "base_model_name_or_path": "model"} | megatron
    (folder / "adapter/adapter_config.json").write_text(json.dumps(adapter))
    (folder / "data").mkdir()
    (folder / "data/README.md").write_text(
        "---\nconfigs:\n- {config_name: a, data_files: 'http://127.0.0.1:9/a.jsonl'}\n---\n"
    )
    names = (
        "planted.py",
        "data/data.py",
        "data/__init__.py",
        "psutil.py",
        "uuid.py",
        "ctypes.py",
        "shutil.py",
        "torch.py",
    )
    for name in (*names, "setproctitle.py", "alphaapollo.py", "conftest.py", "sitecustomize.py", "usercustomize.py"):
        (folder / name).write_text(PLANTED)


def test_no_command_runs_the_code_of_a_folder_that_it_reads(ppo: Runner) -> None:
    words = ("trainer.controller=local", "actor_rollout_ref.rollout.name=fake", "trainer.record_steps=[1]")
    done = ppo.run(*words, "trainer.total_training_steps=1", "trainer.save_freq=1")
    folder, mark = ppo.out / "others", ppo.out / "planted.txt"
    folder.mkdir()
    plant_code(done.folder, ppo.task.model, folder)
    train, dry = f"data.train_files={ppo.task.data / 'train.parquet'}", "trainer.dry_run=True"
    short = ("data.max_prompt_length=32", "data.max_response_length=16")
    path, asks, refused, written = "actor_rollout_ref.model.path", "env.custom_module=", 2, 0
    commands = [
        (["chat", "run"], refused, asks),
        (["chat", "run/checkpoints/step_000001"], refused, asks),
        (["chat", "run/model"], refused, asks),
        (["chat", "model"], refused, "trust_remote_code=true"),
        (["serve", "run"], refused, "model.trust_remote_code=true"),
        (["export", "run"], refused, "trust_remote_code=true"),
        (["export", "adapter"], refused, "Megatron"),
        (["replay", "run/recorded/step_000001"], refused, "algorithm.custom_module="),
        (
            ["rl", f"{path}=run/checkpoints/step_000001", train, dry],
            refused,
            "actor_rollout_ref.model.trust_remote_code",
        ),
        (["rl", f"{path}=model", train, dry], refused, "model.path"),
        (["sft", "model.path=adapter", train, dry], refused, "Megatron"),
        (["generate", "model.path=run/model", train.replace("train_files", "path"), dry], refused, "model.path"),
        (
            ["evolve", "models={a:{path:model}}", train.replace("train_files", "path"), dry, *short],
            refused,
            "trust_remote_code=true",
        ),
        (["rl", f"{path}={ppo.task.model}", "data.train_files=data", dry, *short], refused, "other addresses"),
        (["eval", "data.path=data"], refused, "other addresses"),
        (["report", "run"], written, "written"),
        (["samples", "run"], written, "ground truth"),
    ]
    environment = os.environ | {MARK: str(ppo.out), "PLANTED": str(mark), "PYTHONPATH": str(ROOT)}
    wrong = []
    for command, code, says in commands:
        if command[0] not in SUBCOMMANDS and not is_available("commands", command[0]):
            continue
        output = ppo.out / f"output_{len(ppo.programs)}.txt"
        ppo.programs.append(Program("alphaapollo.cli.main", command, output, environment, folder, warm=True))
        ended = ppo.finish(ppo.programs[-1])
        planted = mark.read_text() if mark.exists() else ""
        if (ended.code, says in ended.output, planted) != (code, True, ""):
            wrong.append((command, ended.code, ended.output[-1500:], planted))
    assert not wrong, "\n".join(map(str, wrong))
