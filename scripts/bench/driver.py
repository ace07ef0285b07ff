"""Measure the controller's time per trajectory with a fake engine: batching, credit, metrics and the rollout log.

    .venv/bin/python scripts/bench/driver.py

Covers an iteration without generation, update and weight sync, at 1k, 4k and 16k trajectories. The last line is a JSON
object; `ratio` is the time per trajectory at the largest size over that at the smallest: 1 = linear.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from alphaapollo.batching.batch import Columns  # noqa: E402
from alphaapollo.config.schema import Algorithm, Config, Data, Env  # noqa: E402
from alphaapollo.engines.fake import FakeEngine  # noqa: E402
from alphaapollo.environments.base import Services, get_environment_spec  # noqa: E402
from alphaapollo.observability.rollout_metrics import compute_rollout_metrics  # noqa: E402
from alphaapollo.rollout.episode import (  # noqa: E402
    EpisodeLimits,
    EpisodeRunner,
    run_group,
)
from alphaapollo.rollout.token_context import AppendContext  # noqa: E402
from alphaapollo.runs.rollout_log import RolloutLog  # noqa: E402
from alphaapollo.trainer.step.build_batch import build_batch  # noqa: E402
from alphaapollo.trainer.step.credit import assign_credit  # noqa: E402
from alphaapollo.trainer.step.learn import compute_batch_metrics  # noqa: E402
from alphaapollo.types import GroupRequest, Message, Prompt, Sampling, Score, TrajectoryGroup  # noqa: E402
from scripts.bench._task import machine  # noqa: E402

GROUP = 16


class LetterRenderer:
    """Renderer without a tokenizer: one token per letter."""

    def encode_prompt(self, content: list[Message] | str) -> list[int]:
        return [ord(letter) % 256 for letter in str(content)[:32]]

    def encode_observation(self, messages: list[Message], last_sampled_token: int | None = None) -> list[int]:
        return []

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


async def score(prompt: Prompt, text: str) -> Score:
    return Score(float(len(text) % 2), {"accuracy": float(len(text) % 2)})


async def roll_out(count: int, max_tokens: int) -> list[TrajectoryGroup]:
    engine = FakeEngine(vocab_size=256, min_tokens=max_tokens // 2, max_tokens=max_tokens)
    letters = LetterRenderer()
    runner = EpisodeRunner(
        engine,
        letters.decode,  # type: ignore[arg-type]
        lambda *_: AppendContext(letters.encode_prompt, letters.encode_observation, lambda content: ()),
        EpisodeLimits(1, 600.0),
    )
    sampling = Sampling(max_tokens, stop_token_ids=(0,))
    requests = [
        GroupRequest(Prompt(i, "bench", f"question {i}"), GROUP, sampling, stream_position=i)
        for i in range(count // GROUP)
    ]
    factory, services = get_environment_spec("single_turn").factory, Services(score, Env())
    groups = (run_group(request, runner.run, lambda _: factory(services)) for request in requests)
    return list(await asyncio.gather(*groups))


def measure(count: int, max_tokens: int) -> dict[str, float]:
    """Milliseconds per trajectory of each part."""
    spans: dict[str, float] = {}

    def span(name: str, start: float) -> float:
        spans[name] = (time.perf_counter() - start) * 1e3 / count
        return time.perf_counter()

    start = time.perf_counter()
    groups = asyncio.run(roll_out(count, max_tokens))
    start = span("rollout (on the rollout worker)", start)
    compute_rollout_metrics(groups, groups, 1, 1.0)
    start = span("metrics", start)
    config = Config(data=Data(max_response_length=max_tokens), algorithm=Algorithm(adv_estimator="grpo"))
    batch = build_batch(groups, config, step=1, num_ranks=2, max_tokens=16384, padded=False, uses_shared_prompts=False)
    start = span("batch", start)
    compute_batch_metrics(batch.layout, False, 0, len(batch.trajectories))
    assign_credit(batch, Columns(), config)
    start = span("credit", start)
    with tempfile.TemporaryDirectory() as folder:
        log = RolloutLog(Path(folder))
        log.write(1, groups)
        log.close()
        span("rollout log (in a thread)", start)
    return spans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure(args.sizes[0], args.max_tokens)  # warm-up
    costs = {size: measure(size, args.max_tokens) for size in args.sizes}
    totals = {size: sum(spans.values()) for size, spans in costs.items()}
    for size, spans in costs.items():
        parts = ", ".join(f"{name} {value:.3f}" for name, value in spans.items())
        print(f"{size} trajectories: {totals[size]:.3f} ms each ({parts})", file=sys.stderr)
    result = {
        "benchmark": "driver",
        "ratio": round(totals[args.sizes[-1]] / totals[args.sizes[0]], 3),
        "ms_per_trajectory": {str(size): round(total, 4) for size, total in totals.items()},
        "parts": {str(size): {name: round(value, 4) for name, value in spans.items()} for size, spans in costs.items()},
        **machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
