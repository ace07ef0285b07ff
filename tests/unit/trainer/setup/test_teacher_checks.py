"""Teachers that cannot be used are refused before a worker starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.trainer.setup.teacher_checks import check_teachers
from alphaapollo.types import Prompt
from examples.quickstart.make_task import make_tokenizer
from tests.unit.trainer.teacher_server import Answer, make_completion, serve


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
    with pytest.raises(ValueError, match=r"no teacher for the data_source 'code/apps' of row 4.*teacher.by_source"):
        check(renderer, {"*GSM8K": "math"}, prompts, **models)
    assert check(renderer, {"*GSM8K": "math", "*": {"math": 0.5, "code": 0.5}}, prompts, **models) == []
    (notice,) = check(renderer, {"*": "math"}, prompts, **models)
    assert notice == "teacher.models.code is not used: teacher.by_source assigns no training prompt to it."


def test_a_server_does_not_read_pictures(renderer: Renderer) -> None:
    prompt = Prompt(0, "a", [{"role": "user", "content": "<image>", "images": [b"png"]}])
    with pytest.raises(ValueError, match=r"do not support pictures. Set teacher.models.big.path instead"):
        check(renderer, {"*": "big"}, [prompt], big={"base_url": "http://127.0.0.1:9/v1", "name": "big"})


def check_server(renderer: Renderer, answer: Callable[[str, dict[str, Any]], Answer]) -> list[str]:
    async def run() -> list[str]:
        async with serve(answer) as url:
            server = {"base_url": url, "name": "big"}
            return await asyncio.to_thread(check, renderer, {"*": "big"}, [Prompt(0, "a", "text")], big=server)

    return asyncio.run(run())


def decode_with(tokenizer: Any) -> Callable[[str, dict[str, Any]], Answer]:
    def answer(path: str, request: dict[str, Any]) -> Answer:
        if path == "/detokenize":
            return {"prompt": tokenizer.decode(request["tokens"])}
        return make_completion(request["prompt"], {}) if len(request["prompt"]) > 100 else 400

    return answer


def test_a_server_must_decode_every_token_like_the_policy(renderer: Renderer, tmp_path: Path) -> None:
    assert check_server(renderer, decode_with(renderer.tokenizer)) == []
    make_tokenizer(tmp_path / "other", ("<left>", "<rigth>"))
    other = load_tokenizer(str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"another tokenizer.*decodes token 273 differently, which is '<right>' for"):
        check_server(renderer, decode_with(other))


def test_a_server_that_refuses_the_longest_sequence_is_refused(renderer: Renderer) -> None:
    def answer(path: str, request: dict[str, Any]) -> Answer:
        return decode_with(renderer.tokenizer)(path, request) if path == "/detokenize" else 400

    with pytest.raises(ValueError, match=r"refused a request .status 400"):
        check_server(renderer, answer)
