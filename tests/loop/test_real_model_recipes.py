"""examples/smollm2/methods with SmolLM2-135M-Instruct: a step of SFT through the script, and its trained tokens."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from alphaapollo.config.schema import SftData
from alphaapollo.data.examples import load_examples
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.runs.run_history import read_examples
from tests.loop.conftest import ROOT
from tests.loop.page_shell import CommandServer, make_stand_ins

pytestmark = pytest.mark.timeout(600)

SCRIPT = ROOT / "examples/smollm2/methods/run.sh"
DEADLINE = 500.0
END = "<|im_end|>"
STEP = ["data.train_batch_size=2", "trainer.total_training_steps=1", "trainer.cpu_threads=1"]
SIZES = {"main_sft": [*STEP, "data.val_max_samples=2"]}
PROBLEM = {
    "question": "A shop has 3 boxes with 4 apples each, and sells 2 apples. How many apples are left?",
    "answer": "There are 3*4=<<3*4=12>>12 apples.\nSo 12-2=<<12-2=10>>10 are left.\n#### 10",
}


class SmallRuns(CommandServer):
    """Runs the commands of a script to their ends, with small sizes."""

    def complete(self, module: str, words: list[str]) -> list[str]:
        return [*words, *SIZES.get(module.removeprefix("alphaapollo.trainer."), [])]


@dataclass(frozen=True)
class MethodRunner:
    """Runs the script with a folder of its own. Later methods use the models of earlier ones."""

    out: Path
    environment: dict[str, str]
    server: SmallRuns

    def run(self, method: str, *keys: str, **variables: str) -> str:
        """Run a method. Returns the output of the script itself, without its commands."""
        done = subprocess.run(
            ["bash", str(SCRIPT), method, *keys], env=self.environment | variables, text=True, timeout=DEADLINE,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert not done.returncode and not self.server.failed, done.stdout[-6000:]
        return done.stdout

    def read_metrics(self, run: str) -> dict[str, float]:
        """Metrics of the last iteration of a run."""
        return json.loads((self.out / run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def methods(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MethodRunner]:
    out, folder = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("shell")
    (out / "model").symlink_to(smollm2)
    for split in ("train", "test"):
        (folder / f"gsm8k_{split}.jsonl").write_text(f"{json.dumps(PROBLEM)}\n" * 4)
    with SmallRuns(folder, {}, {}) as server:
        environment = make_stand_ins(folder, server) | {"OUT": str(out), "GSM8K": str(folder)}
        environment["PYTHON"] = str(folder / ".venv/bin/python")
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield MethodRunner(out, environment, server)
        server.shutdown()
        thread.join()


def test_sft_trains_the_assistants_turns_and_their_ends(methods: MethodRunner) -> None:
    """On chats with calls of a tool: exactly their texts, each with the token that ends it."""
    shown = methods.run("sft")
    assert 0.1 < methods.read_metrics("sft")["val/loss"] < 5
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
    assert shown.count(" tokens trained ") == 3
