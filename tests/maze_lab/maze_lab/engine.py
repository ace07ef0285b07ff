import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.config.requirements import CheckContext, Requirement, requirement
from alphaapollo.config.schema import Rollout
from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.types import Completion, ImageInput, Sampling, StopReason

REQUIREMENTS: list[Requirement] = []


@requirement(Rollout, "name top_p", "a walk has no probabilities", "Set top_p=1", table=REQUIREMENTS)
def truncates_a_walk(rollout: Rollout, context: CheckContext) -> bool:
    return rollout.top_p < 1


class WalkEngine(Engine):
    """Engine without a model, whose token ids go up by `stride`."""

    reads_images = False

    @classmethod
    def list_requirements(cls) -> list[Requirement]:
        return REQUIREMENTS

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.stride = spec.rollout.plugins["walk"].stride
        self.vocab_size = json.loads((Path(spec.model_path) / "config.json").read_text())["vocab_size"]
        self.version = 0
        self.unpaused = asyncio.Event()
        self.unpaused.set()

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        await self.unpaused.wait()
        answer = [(token_ids[-1] + self.stride * step) % self.vocab_size for step in range(1, 5)][: sampling.max_tokens]
        return Completion(answer, [-1.0] * len(answer), StopReason.STOP, self.version)

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def hold_requests(self) -> None:
        self.unpaused.clear()

    async def continue_requests(self) -> None:
        self.unpaused.set()

    async def load_folder(self, folder: str) -> None:
        """Ignore the weights that the trainer wrote to `folder`."""

    async def apply_weights(self, version: int) -> None:
        self.version = version
