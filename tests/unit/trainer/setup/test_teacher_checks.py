"""Teachers that cannot be used are refused before a worker starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, Model, Teacher
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.launch.policy import check_teacher_vocabulary, list_model_uses
from alphaapollo.planning.model_requirements import check_models
from alphaapollo.session.teachers import TeacherServerError
from alphaapollo.trainer.setup.teachers import check_teachers
from alphaapollo.types import Prompt
from examples.quickstart.make_task import make_tokenizer
from tests.unit.session.teacher_server import Answer, make_completion, serve
from tests.unit.tiny import save_model

SIZE = 272  # of the quickstart's vocabulary
WITH_DEMONSTRATION = Prompt(0, "test", "text", extra_info={"demonstration": "4"})


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    make_tokenizer(tmp_path / "policy", ("<left>", "<right>"))
    return Renderer(load_tokenizer(str(tmp_path / "policy")))


def check(renderer: Renderer, by_source: dict[str, Any], prompts: list[Prompt], **models: Any) -> list[str]:
    teacher = {"divergence": "sampled", "models": models, "by_source": by_source}
    return check_teachers(Config.model_validate({"teacher": teacher}), renderer, prompts)


def test_every_data_source_needs_a_teacher_and_unused_teachers_are_reported(renderer: Renderer, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "teacher", ("<left>", "<right>"))
    models = {name: {"path": str(tmp_path / "teacher")} for name in ("math", "code")}
    prompts = [Prompt(3, "openai/gsm8k", "1+1"), Prompt(4, "code/apps", "sort")]
    with pytest.raises(ValueError, match=r"'code/apps' of row 4.*teacher.by_source"):
        check(renderer, {"*GSM8K": "math"}, prompts, **models)
    assert check(renderer, {"*GSM8K": "math", "*": {"math": 0.5, "code": 0.5}}, prompts, **models) == []
    (notice,) = check(renderer, {"*": "math"}, prompts, **models)
    assert notice.startswith("teacher.models.code is not used")


def test_a_server_does_not_read_images(renderer: Renderer) -> None:
    prompt = Prompt(0, "a", [{"role": "user", "content": "<image>", "images": [b"png"]}])
    with pytest.raises(ValueError, match=r"images.* Set teacher.models.big.path"):
        check(renderer, {"*": "big"}, [prompt], big={"base_url": "http://127.0.0.1:9/v1", "name": "big"})


def check_server(renderer: Renderer, answer: Callable[[str, dict[str, Any]], Answer]) -> list[str]:
    async def run() -> list[str]:
        async with serve(answer) as url:
            server = {"base_url": url, "name": "big"}
            return await asyncio.to_thread(check, renderer, {"*": "big"}, [Prompt(0, "a", "text")], big=server)

    return asyncio.run(run())


def decode_with(tokenizer: Any, shortest: int = 100) -> Callable[[str, dict[str, Any]], Answer]:
    """Answers of a server with this tokenizer, which refuses prompts of at most `shortest` tokens."""

    def answer(path: str, request: dict[str, Any]) -> Answer:
        if path == "/detokenize":
            return {"prompt": tokenizer.decode(request["tokens"])}
        return make_completion(request["prompt"], {}) if len(request["prompt"]) > shortest else 400

    return answer


def test_a_server_must_read_and_decode_every_token_like_the_policy(renderer: Renderer, tmp_path: Path) -> None:
    assert check_server(renderer, decode_with(renderer.tokenizer)) == []
    make_tokenizer(tmp_path / "other", ("<left>", "<rigth>"))
    with pytest.raises(ValueError, match=r"another tokenizer.*tokens 0 to 273"):
        check_server(renderer, decode_with(load_tokenizer(str(tmp_path / "other"))))
    with pytest.raises(TeacherServerError, match=r"BadRequestError.*400"):
        check_server(renderer, decode_with(renderer.tokenizer, shortest=10**6))


def save(folder: Path, size: int = SIZE, more_words: tuple[str, ...] = ()) -> str:
    """A tokenizer, and a configuration with a head of `size` rows."""
    make_tokenizer(folder, more_words)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    return str(folder)


def check_vocabulary(teacher: str, divergence: str, policy: str) -> list[str]:
    own = Teacher(divergence=divergence, model={"path": teacher})
    renderer = Renderer(load_tokenizer(policy))
    return check_teacher_vocabulary("teacher.model", own.model, own, Model(path=policy), renderer)


@pytest.mark.parametrize(
    ("policy", "teacher", "allowed", "refused", "facts"),
    [
        ((), (SIZE + 16,), ("sampled", "reverse", "forward", "jsd"), (), ""),
        (
            (SIZE, ("<left>", "<right>")),
            (SIZE, ("<right>", "<left>")),
            (),
            ("sampled", "jsd"),
            "'<left>', '<right>'.*docs/sft.md",
        ),
        ((), (SIZE + 16, ("<left>",)), ("sampled",), ("reverse",), "'<left>'.* Set teacher.divergence=sampled"),
        ((SIZE + 16,), (), ("sampled",), ("forward",), "272 logits .* 288"),
    ],
    ids=["same", "other ids", "more tokens", "smaller head"],
)
def test_divergences_that_two_vocabularies_allow(
    tmp_path: Path, policy: tuple[Any, ...], teacher: tuple[Any, ...], allowed: Any, refused: Any, facts: str
) -> None:
    folders = save(tmp_path / "teacher", *teacher), save(tmp_path / "policy", *policy)
    for divergence in allowed:
        assert check_vocabulary(folders[0], divergence, folders[1]) == []
    for divergence in refused:
        with pytest.raises(ValueError, match=facts):
            check_vocabulary(folders[0], divergence, folders[1])


def test_another_chat_template_is_a_notice(tmp_path: Path) -> None:
    policy, teacher = save(tmp_path / "policy"), save(tmp_path / "teacher")
    template = tmp_path / "teacher" / "chat_template.jinja"
    assert template.exists()
    template.write_text("{{ messages[0].content }}")
    (notice,) = check_vocabulary(teacher, "sampled", policy)
    assert "has another chat template" in notice


def self_taught(model: Path, *words: str) -> Config:
    lengths = ["data.max_prompt_length=40", "data.max_response_length=20"]
    return load_config(Config, "ppo", ["algorithm=sdft", f"actor_rollout_ref.model.path={model}", *lengths, *words])


def find_errors(config: Config, prompts: list[Prompt]) -> str:
    """The error of the policy's model and of the prompts, if the policy is its own teacher."""
    renderer = Renderer(load_tokenizer(config.actor_rollout_ref.model.path))
    try:
        check_models(list_model_uses(config))
        check_teachers(config, renderer, prompts)
    except ValueError as error:
        return str(error)
    return ""


def test_prompts_and_lengths_of_a_self_teacher_are_checked(tmp_path: Path) -> None:
    """The model reads 128 tokens: a prompt of 108 and a response of 20."""
    model, key = save_model("qwen3", tmp_path / "model"), "teacher.self_teacher.max_prompt_length"
    assert not find_errors(self_taught(model), [WITH_DEMONSTRATION])
    assert not find_errors(self_taught(model, f"{key}=108"), [WITH_DEMONSTRATION])
    error = find_errors(self_taught(model, f"{key}=109"), [WITH_DEMONSTRATION])
    assert key in error and "= 129" in error and "128 tokens" in error
    assert "row 1 has None" in find_errors(self_taught(model), [WITH_DEMONSTRATION, Prompt(1, "test", "text")])


def test_a_vision_language_model_is_no_self_teacher(vision_folder: Callable[[str], Path]) -> None:
    error = find_errors(self_taught(vision_folder("qwen3_vl")), [WITH_DEMONSTRATION])
    assert error.startswith("teacher.self_teacher.context") and "vision-language" in error
