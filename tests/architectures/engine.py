"""Comparison of vLLM's log-probs on a CPU with the trainer's, called by `python -m scripts.models_page --engine`."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from alphaapollo.engines.types import EngineError
from alphaapollo.types import Sampling
from tests.architectures.layouts import draw_rows, load_policy
from tests.architectures.models import MAX_LENGTH, Architecture
from tests.loop.engine_kit import start_engine

LIMITS = {"float32": 1e-4, "bfloat16": 0.1}  # of the mean |difference| in nats, by the engine's dtype
NUM_SAMPLED = 30


def measure_engine(architecture: Architecture) -> float | str:
    """Return the mean |difference| in nats between the log-probs of vLLM and of the trainer, over the prompt and the
    sampled tokens of one row; or vLLM's reason for not running the model."""
    prompt = draw_rows().token_ids[: MAX_LENGTH - NUM_SAMPLED].tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with start_engine(
                architecture.build_model(), folder, max_model_len=MAX_LENGTH, **architecture.rollout
            ) as session:
                (answer,) = session.generate((prompt, Sampling(NUM_SAMPLED, seed=3)))
                scored = session.run(session.engine.log_probs(prompt))
        except (EngineError, ValueError) as error:
            log = folder / "engine.log"
            return _find_reason(f"{error}\n{log.read_text(errors='replace')}")
        policy = load_policy(folder / "model", "padded")
    ids = torch.tensor([prompt + answer.token_ids])
    with torch.no_grad():
        own = policy.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return float((own - torch.tensor(scored + answer.logprobs)).abs().mean())


def _find_reason(text: str) -> str:
    """Return the first error of a log, up to its first full stop: the reason why vLLM does not run the model."""
    found = re.search(r"^(?:\S*Error: |\s*Assertion failed, )(.+?)(?:\. |\.$| \[type=|$)", text, re.MULTILINE)
    return found[1] if found else text.splitlines()[0]
