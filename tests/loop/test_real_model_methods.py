"""examples/smollm2/methods with SmolLM2-135M-Instruct: one iteration of each method through its script, the tokens that
SFT trains on, and exported models in transformers, vLLM and GGUF files."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from alphaapollo.config.resolve import has_bfloat16_instructions
from alphaapollo.config.schema import SftData
from alphaapollo.data.examples import load_examples
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.runs.training_examples import read_examples
from examples.gallery.runs import read_metrics
from examples.smollm2.methods.make_student import make_student
from examples.symptoms.runs import holds
from tests.loop.conftest import DEADLINE, ROOT
from tests.loop.engine_kit import needs_suites
from tests.loop.page_shell import CommandServer, make_stand_ins

pytestmark = pytest.mark.skipif(
    not has_bfloat16_instructions(), reason="in float32, these runs take more than ten minutes"
)

SCRIPT = ROOT / "examples/smollm2/methods/run.sh"
END = "<|im_end|>"
ENGINE = ["rollout.kv_cache_gib=0.2", "rollout.cpu_threads=1"]
TUNING = ["data.train_batch_size=2", "trainer.total_training_steps=1", "trainer.cpu_threads=1"]
SIZES = {
    "main_ppo": [
        *TUNING,
        *(f"actor_rollout_ref.{key}" for key in ENGINE),
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.val_max_samples=4",
        "env.rollout.n=2",
        "trainer.val_before_train=False",
    ],
    "main_sft": [*TUNING, "data.val_max_samples=2"],
    "main_dpo": TUNING,
    "main_generation": [*ENGINE, "data.max_samples=12"],
}
PROBLEM = {
    "question": "A shop has 3 boxes with 4 apples each, and sells 2 apples. How many apples are left?",
    "answer": "There are 3*4=<<3*4=12>>12 apples.\nSo 12-2=<<12-2=10>>10 are left.\n#### 10",
}


REWARD = "def compute_score(prompt, completion):\n    return len(completion) / 100\n"  # differs within a group


class SmallRuns(CommandServer):
    """Runs the commands of a script to their ends, with small sizes."""

    def complete(self, module: str, words: list[str]) -> list[str]:
        return [*words, *SIZES.get(module.removeprefix("alphaapollo.trainer."), [])]


@dataclass(frozen=True)
class MethodRunner:
    """Runs the script with a folder of its own. Later methods use the models of earlier ones."""

    out: Path
    environment: dict[str, str]
    reward: Path
    server: SmallRuns

    def run(self, method: str, *keys: str, **variables: str) -> str:
        """Run a method. Returns the output of the script itself, without its commands."""
        done = subprocess.run(
            ["bash", str(SCRIPT), method, *keys], env=self.environment | variables, text=True, timeout=DEADLINE,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert not done.returncode and not self.server.failed, done.stdout[-6000:]
        return done.stdout

    def read_metrics(self, run: str) -> list[dict[str, float]]:
        return read_metrics(self.out / run)

    def read_results(self, run: str) -> list[dict[str, Any]]:
        """Results of a generation, in the order of the prompts."""
        results = map(json.loads, (self.out / run / "results.jsonl").read_text().splitlines())
        return sorted(results, key=lambda result: (result["prompt_id"], result["sample"]))


@pytest.fixture(scope="module")
def methods(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MethodRunner]:
    out, folder = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("shell")
    (out / "model").symlink_to(smollm2)
    for split in ("train", "test"):
        (folder / f"gsm8k_{split}.jsonl").write_text(f"{json.dumps(PROBLEM)}\n" * 4)
    (folder / "reward.py").write_text(REWARD)
    with SmallRuns(folder, {}, {}) as server:
        environment = make_stand_ins(folder, server) | {"OUT": str(out), "GSM8K": str(folder)}
        environment["PYTHON"] = str(folder / ".venv/bin/python")
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield MethodRunner(out, environment, folder / "reward.py", server)
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def sft(methods: MethodRunner) -> str:
    """Output of the script, whose model other tests use."""
    return methods.run("sft")


@pytest.mark.nightly
def test_sft_trains_the_assistants_turns_and_their_ends(methods: MethodRunner, sft: str) -> None:
    """On chats with calls of a tool: exactly their texts, each with the token that ends it."""
    assert 0.1 < methods.read_metrics("sft")[-1]["val/loss"] < 5
    model, file = str(methods.out / "model"), str(methods.out / "gsm8k/train.parquet")
    tokenizer, renderer = AutoTokenizer.from_pretrained(model), Renderer(load_tokenizer(model))
    chats, loaded = pq.read_table(file).to_pylist(), load_examples(file, renderer, SftData(max_length=512)).examples
    logged = read_examples(methods.out / "sft")[0].rows[0].parts
    for chat, row in zip(chats, loaded, strict=True):
        complete = tokenizer.apply_chat_template(chat["messages"], tokenize=False).removesuffix("\n")
        assert list(row.token_ids) == tokenizer(complete, add_special_tokens=False)["input_ids"]
        turns = [one["content"] + END for one in chat["messages"] if one["role"] == "assistant"]
        trained = [token for token, is_trained in zip(row.token_ids, row.action_mask, strict=True) if is_trained]
        assert len(turns) == 3 and tokenizer.decode(trained) == "".join(turns)
        assert [text for _, is_trained, text in logged if is_trained] == turns
    assert sft.count(" tokens trained ") == 3


SCORED, ONE_OR_TWO_TURNS = "last outcome/scored > 0.999", ["last outcome/failed < 1e-9", "last num_turns/mean < 2.001"]
METHODS = {  # what a run of one iteration shows
    "lora": [SCORED, "last mismatch/abs < 0.1"],
    "ppo": [SCORED, "last critic/grad_norm > 0", "last critic/vf_loss > 0"],
    "tool": [*ONE_OR_TWO_TURNS, "last num_turns/mean > 1"],
    "agent": [*ONE_OR_TWO_TURNS, "last agent/branches < 1e-9", "last agent/rerendered < 1e-9"],
    "distill": ["last distill/forward_kl > 0.1", "last distill/forward_kl < 20"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_method(methods: MethodRunner, method: str) -> None:
    reward = [f"custom_reward_function.path={methods.reward}"] * (SCORED in METHODS[method])
    methods.run(method, *reward, f"trainer.export_hf={method == 'lora'}")
    assert [one for one in METHODS[method] if not holds(one, methods.read_metrics(method))] == []


@pytest.mark.nightly
def test_pass_at_k_and_dpo_on_pairs_of_its_own_answers(methods: MethodRunner) -> None:
    methods.run("pass_at_k", "data.n_samples=4")
    values = json.loads((methods.out / "pass_at_k/summary.json").read_text())["all"]["figures"]
    assert 0 <= values["pass@1"]["value"] <= values["pass@2"]["value"] <= values["pass@4"]["value"] <= 1
    methods.run("dpo")
    (pair, *_) = pq.read_table(methods.out / "pairs_train/train.parquet").to_pylist()
    assert pair["chosen"] != pair["rejected"]
    metrics = methods.read_metrics("dpo")[-1]
    assert metrics["train/loss"] == pytest.approx(0.693, abs=0.05) and 0 <= metrics["val/accuracy"] <= 1


def test_a_student_has_layers_of_its_teacher(methods: MethodRunner, tmp_path: Path) -> None:
    assert make_student(methods.out / "model", tmp_path, 3) < 40e6
    student, teacher = (load_file(one / "model.safetensors") for one in (tmp_path, methods.out / "model"))
    kept = [f"model.layers.{index}.mlp.up_proj.weight" for index in (0, 1, 29)]
    assert all(torch.equal(student[f"model.layers.{i}.mlp.up_proj.weight"], teacher[key]) for i, key in enumerate(kept))


@pytest.mark.nightly
@needs_suites
def test_suites(methods: MethodRunner, sft: str) -> None:
    methods.run("suite", *ENGINE, RUN=str(methods.out / "sft"))
    results = read_suite_results(methods.out / "sft")
    assert {one.name for one in results} == {"sums", "sums_chat"}
    assert all(not one.error and one.scores[0].rows == 8 for one in results)
