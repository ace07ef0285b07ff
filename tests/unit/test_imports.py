"""What processes import before they need it. Each import of torch or vLLM takes seconds of a run's start."""

import json

from tests.processes import run_python

HEAVY = {"torch", "transformers", "vllm", "ray", "pandas"}
STEPS = [  # of one process, and what it must not have imported until the end of the step
    ("import alphaapollo", HEAVY | {"numpy", "hydra", "pydantic"}),
    ("from alphaapollo.cli.main import main; main(['--help'])", HEAVY | {"hydra", "pydantic"}),
    ("import alphaapollo.config.load, alphaapollo.config.check", HEAVY | {"numpy"}),
    ("from alphaapollo import rl, sft, dpo, evaluate", HEAVY),
    ("main(['rl', '--help'])", HEAVY),
    ("from alphaapollo.trainer import main_ppo; from alphaapollo.config.schema import Config", HEAVY),
    ("alphaapollo.config.load.load_config(Config, 'ppo', ['algorithm.adv_estimator=grpo', 'trainer.seed=3'])", HEAVY),
    # a rollout worker, until it has started the engine's fork server
    ("import alphaapollo.controller.ray_ranks, alphaapollo.rollout.worker", HEAVY - {"ray"}),
    ("import alphaapollo.engines.vllm.engine", HEAVY - {"ray"}),
]


def test_imports():
    program = "import json, sys\n"
    for code, forbidden in STEPS:
        program += f"{code}\nprint(json.dumps(sorted({forbidden!r} & set(sys.modules))), file=sys.stderr)\n"
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    assert [code for (code, _), imported in zip(STEPS, found, strict=True) if imported] == [], found
