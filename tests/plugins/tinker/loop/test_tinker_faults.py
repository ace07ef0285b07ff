"""`alphaapollo tinker`: a killed server, Ctrl-C, the newest client, and the recipes of tinker-cookbook."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loop.conftest import DEADLINE, MARK, ROOT, Runner, wait_until_nothing_is_left
from tests.loop.ray_nodes import two_ray_nodes
from tests.plugins.tinker.loop.tinker_kit import KEYS, start_program, start_server

tinker = pytest.importorskip("tinker")
from tests.plugins.tinker.loop.tinker_calls import get, train  # noqa: E402  needs the client

CALLS, DRIVER = (Path(__file__).parent / name for name in ("tinker_calls.py", "tinker_recipes.py"))

UNDISTURBED = """
import json, sys
from tests.plugins.tinker.loop.tinker_calls import TEXTS, connect, get, train, types

with connect(sys.argv[1], sys.argv[2]) as c:
    tenants = c.create(8, 1), c.create(4, 2, train_mlp=False)
    for one in tenants:
        train(one, 3)
    paths = [get(one.save_state("three")).path for one in tenants]
    print(json.dumps([paths, [train(one, 3) for one in tenants]]), flush=True)
    while True:
        train(tenants[0], 100)
"""


def test_a_killed_server_and_ctrl_c(ppo: Runner) -> None:
    """After kill -9 in the middle of steps, two tenants continue from their states bit for bit. Ctrl-C then saves the
    steps that they have not saved."""
    first = start_server(ppo)
    command = [sys.executable, "-c", UNDISTURBED, first.url, KEYS[0]]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as undisturbed:
        assert undisturbed.stdout is not None
        paths, losses = json.loads(undisturbed.stdout.readline())
        metrics = first.runs / paths[0].removeprefix("tinker://").partition("/")[0] / "metrics.jsonl"
        first.wait_for(lambda: len(metrics.read_text().splitlines()) > 8)
        first.kill()
        undisturbed.kill()
    wait_until_nothing_is_left(ppo)
    second = start_server(ppo)
    service = tinker.ServiceClient(base_url=second.url, api_key=KEYS[0])
    tenants = [get(service.create_training_client_from_state_with_optimizer(path)) for path in paths]
    steps = [[train(one, 1)[0] for one in tenants] for _ in range(3)]  # interleaved
    assert [list(one) for one in zip(*steps, strict=True)] == losses
    second.program.signal(signal.SIGINT)
    assert second.program.wait(DEADLINE) == 130
    service._session_holder.close()  # ends its heartbeats; close() would wait for the server
    wait_until_nothing_is_left(ppo)
    for tenant in tenants:
        assert [one.name for one in (second.runs / tenant.model_id / "weights").iterdir()] == ["unsaved_step_000003"]


def test_other_machines_need_a_key(ppo: Runner) -> None:
    program = start_program(ppo, ppo.task.model, "--host", "0.0.0.0", f"trainer.output_dir={ppo.out}", keys=())
    assert program.wait(DEADLINE) == 2
    assert "--host 0.0.0.0" in program.printed and "TINKER_API_KEY" in program.printed


# The newest packages.


def make_environment(folder: Path, *packages: str) -> Path:
    """Python of a new environment with packages of the index."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=DEADLINE)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(install, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return python


def run(python: Path, folder: Path, *words: object) -> str:
    """Output of a script that must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TINKER"))}
    environment |= {"TINKER_API_KEY": KEYS[0], "HF_HUB_OFFLINE": "1"}
    command = [str(python), *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.nightly
def test_the_newest_client(ppo: Runner, tmp_path: Path) -> None:
    """Every call with the newest client of the index. A failure names its version."""
    python, server = make_environment(tmp_path / "environment", "torch==2.13.0", "tinker"), start_server(ppo)
    output = run(python, tmp_path, CALLS, server.url)
    assert re.search(r"tinker [\d.]+: all calls passed", output)


EVERY = ("learning_rate=1e-2", "lora_rank=8", "save_every=3")
RECIPES = {
    "sl_loop": ("max_length=256", "batch_size=64", "max_steps=6"),
    "sl_basic": ("eval_every=3", "max_steps=6"),
    "rl_loop": ("batch_size=4", "group_size=8", "max_tokens=4", "max_steps=6"),
    "rl_basic": ("max_tokens=4", "eval_every=2", "max_steps=4"),
}


@pytest.mark.nightly
def test_recipes_of_the_cookbook(ppo: Runner, tmp_path: Path) -> None:
    """Four recipes, unchanged but for data sets and renderer, take steps and write checkpoints."""
    python = make_environment(tmp_path / "environment", "torch==2.13.0", "tinker-cookbook[math-rl]")
    server = start_server(ppo, "data.max_prompt_length=480", "data.max_response_length=32")  # RL prompts are long
    for recipe, options in RECIPES.items():
        log = tmp_path / recipe
        run(python, tmp_path, DRIVER, recipe, server.url, ppo.task.model, f"log_path={log}", *options, *EVERY)
        metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
        norms = [one["grad_norm:mean"] for one in metrics if "grad_norm:mean" in one]
        assert norms and all(norm > 0 for norm in norms), recipe
        if recipe.startswith("sl"):
            losses = [one["train_mean_nll"] for one in metrics if "train_mean_nll" in one]
            assert len(losses) == 6 and losses[-1] < losses[0], losses
        saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
        assert [one["name"] for one in saved] == ["000003", "final"], recipe
        for one in saved:
            assert (server.runs / one["state_path"].removeprefix("tinker://")).is_dir()


@pytest.mark.nightly
def test_two_ranks_and_engines_on_two_nodes(ppo: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ray_nodes(tmp_path, monkeypatch, **{MARK: str(ppo.out)}):
        server = start_server(ppo, "--engines", 2, "trainer.nnodes=2")
        assert "all calls passed" in run(Path(sys.executable), tmp_path, CALLS, server.url)
        server.program.signal(signal.SIGINT)
        assert server.program.wait(DEADLINE) == 130
