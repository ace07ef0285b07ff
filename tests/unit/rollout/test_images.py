"""Images in episodes, with a tiny Qwen3-VL processor: 32 x 32 pixels have 4 placeholders, 48 x 32 have 6."""

import asyncio
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from alphaapollo.config.schema import Data, Env
from alphaapollo.data.images import load_image_processor
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.environments.base import Observation, Services, StepResult
from alphaapollo.environments.single_turn import SingleTurnEnvironment
from alphaapollo.rollout.episode import EpisodeLimits, EpisodeRunner, EpisodeTask, run_group
from alphaapollo.rollout.token_context import PromptRenderer, check_rows_match_turns
from alphaapollo.rollout.worker import make_token_context_factory
from alphaapollo.types import GroupRequest, ImageInput, Outcome, Prompt, Sampling, Score
from tests.unit.rollout.test_episode import Environment, done
from tests.vision.models import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make("qwen3_vl", folder)
    return folder


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    tokenizer = load_tokenizer(str(folder))
    return Renderer(tokenizer, images=load_image_processor(str(folder), tokenizer))


def draw(width: int, height: int, red: int = 200) -> np.ndarray:
    return np.full((height, width, 3), (red, 10, 10), np.uint8)


def encode(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


SMALL, WIDE = encode(draw(32, 32)), encode(draw(48, 32))
QUESTION = [{"role": "user", "content": "<image> How many?", "images": [SMALL]}]


class RecordingEngine(FakeEngine):
    """Fake engine that answers "a<|im_end|>" and records prompts and images."""

    def __init__(self, renderer: Renderer, answer: str = "a<|im_end|>"):
        super().__init__(256, script=lambda token_ids, sampling: renderer.encode([answer])[0])
        self.received: list[tuple[list[int], tuple[ImageInput, ...]]] = []

    async def generate(self, token_ids, sampling, request_id, images=()):
        self.received.append((token_ids, tuple(images)))
        return await super().generate(token_ids, sampling, request_id, images)


def make_runner(engine: FakeEngine, renderer: Renderer, context: str = "append") -> EpisodeRunner:
    data = Data(train_files="x", max_prompt_length=200)
    make_context = make_token_context_factory(Env(context=context), renderer, data)
    placeholder = renderer.images.placeholder_id if renderer.images else None
    return EpisodeRunner(engine, renderer.decode, make_context, EpisodeLimits(9, 9.0), placeholder_id=placeholder)


def play(engine: FakeEngine, renderer: Renderer, environment: Environment, context: str = "append"):
    task = EpisodeTask(Prompt(3, "s", QUESTION), 0, lambda _: environment, Sampling(200), lambda turn: turn, "t")
    return asyncio.run(make_runner(engine, renderer, context).run(task))


def show_image(encoded_image: object, text: str = "Now: <image>") -> StepResult:
    return StepResult(Observation([{"role": "user", "content": text, "images": [encoded_image]}]))


def count_placeholders(renderer: Renderer, token_ids: list[int]) -> int:
    return list(token_ids).count(renderer.images.placeholder_id)


def test_two_turns_with_an_image_each(renderer: Renderer) -> None:
    engine = RecordingEngine(renderer)
    environment = Environment(show_image(draw(48, 32)), done(1.0), first=Observation(QUESTION))
    trajectory = play(engine, renderer, environment)
    small, wide = renderer.images.prepare(SMALL), renderer.images.prepare(WIDE)
    assert [images for _, images in engine.received] == [(small,), (small, wide)]
    assert [turn.context_images for turn in trajectory.turns] == [(small,), (wide,)]
    assert [count_placeholders(renderer, ids) for ids, _ in engine.received] == [4, 10]
    (row,) = trajectory.rows
    assert row.images == (small, wide) and count_placeholders(renderer, row.token_ids) == 10
    assert trajectory.turns[0].observation == [{"role": "user", "content": "Now: <image>", "images": [WIDE]}]
    chat = [*QUESTION, {"role": "assistant", "content": "a"}, *trajectory.turns[0].observation]
    assert engine.received[1][0] == renderer.encode_prompt(chat)  # what transformers' chat template makes of it


def test_each_prompt_of_memory_context_has_its_own_images(renderer: Renderer) -> None:
    engine = RecordingEngine(renderer)
    replies = show_image(draw(48, 32)), show_image(encode(draw(16, 16))), done(1.0)
    environment = Environment(*replies, first=Observation(QUESTION))
    trajectory = play(engine, renderer, environment, "memory")
    small, wide, tiny = (renderer.images.prepare(one) for one in (SMALL, WIDE, encode(draw(16, 16))))
    assert [images for _, images in engine.received] == [(small,), (small, wide), (small, wide, tiny)]
    assert [row.images for row in trajectory.rows] == [images for _, images in engine.received]
    assert [count_placeholders(renderer, row.token_ids) for row in trajectory.rows] == [4, 10, 11]


def test_samples_of_a_group_share_an_image_also_after_pickling(renderer: Renderer) -> None:
    async def score(prompt: Prompt, text: str) -> Score:
        return Score(1.0)

    runner = make_runner(RecordingEngine(renderer), renderer)
    request = GroupRequest(Prompt(3, "s", QUESTION), 4, Sampling(200), stream_position=0)
    group = asyncio.run(run_group(request, runner.run, lambda _: SingleTurnEnvironment(Services(score, Env()))))
    read = pickle.loads(pickle.dumps(group))
    images = [row.images[0] for one in read.trajectories for row in one.rows]
    images += [turn.context_images[0] for one in read.trajectories for turn in one.turns]
    assert len(images) == 8 and len({id(image) for image in images}) == 1
    assert images[0].num_placeholders == 4 and images[0].digest == renderer.images.prepare(SMALL).digest


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (show_image(b"no image"), "cannot read an image of 8 bytes"),
        (show_image(draw(1, 300)), "the model's processor rejects"),
        (show_image(draw(8, 8).astype(np.float32)), "float32 array of shape (8, 8, 3). Use a uint8 array"),
    ],
)
def test_bad_images_fail_the_episode_with_their_reason(renderer: Renderer, result: StepResult, reason: str) -> None:
    class Repeating(Environment):
        async def step(self, action: str) -> StepResult:
            return result

    trajectory = play(RecordingEngine(renderer), renderer, Repeating(first=Observation(QUESTION)))
    assert trajectory.score.outcome is Outcome.ENVIRONMENT_FAILED
    assert reason in trajectory.score.reason and trajectory.score.reason.endswith("(attempt 2 of 2)")
    assert np.isnan(trajectory.reward)


def test_a_sampled_placeholder_fails_the_run(renderer: Renderer) -> None:
    engine = RecordingEngine(renderer, "a<|image_pad|>")
    with pytest.raises(AssertionError, match="sampled a placeholder"):
        play(engine, renderer, Environment(done(1.0), first="2+2=?"))


def test_images_of_a_row_must_be_those_of_the_engine(renderer: Renderer) -> None:
    engine = RecordingEngine(renderer)
    trajectory = play(engine, renderer, Environment(done(1.0), first=Observation(QUESTION)))
    rows, turns = trajectory.rows, trajectory.turns
    prompts, images = zip(*engine.received, strict=True)
    check_rows_match_turns(rows, turns, prompts, images)
    other = renderer.images.prepare(encode(draw(32, 32, red=3)))  # of the same size
    with pytest.raises(AssertionError, match="images before an action differ"):
        check_rows_match_turns(rows, turns, prompts, [(other,)])
    rows[0].images = (*rows[0].images, other)
    with pytest.raises(AssertionError, match="images that the engine did not receive"):
        check_rows_match_turns(rows, turns, prompts, images)
    with pytest.raises(AssertionError, match=r"4 .* for 8 image features"):
        check_rows_match_turns(rows, turns, prompts, [rows[0].images])


def test_rendered_prompts_are_cached_by_their_images(renderer: Renderer) -> None:
    prompts = PromptRenderer(renderer.encode_prompt, 99, "error")
    other = [{**QUESTION[0], "images": [WIDE]}]
    lengths = [
        len(prompts(content)) for content in (QUESTION, other, [{**QUESTION[0], "images": [bytes(bytearray(SMALL))]}])
    ]
    assert lengths[1] == lengths[0] + 2 and lengths[2] == lengths[0] and len(prompts._rendered) == 2
