import pytest

from alphaapollo.environments.base import EnvironmentFailure
from alphaapollo.rollout import context
from alphaapollo.rollout.context import PromptRenderer, PromptTooLong


def letters(content):
    return [ord(letter) for letter in content]


@pytest.mark.parametrize(("limit", "truncation", "kept"), [(3, "error", "abc"), (2, "left", "bc"), (2, "right", "ab")])
def test_only_a_prompt_over_the_limit_is_truncated(limit, truncation, kept):
    assert PromptRenderer(letters, limit, truncation)("abc") == letters(kept)


@pytest.mark.parametrize("truncation", ["error", "drop"])
def test_too_long_prompt_is_an_environment_failure(truncation):
    with pytest.raises(PromptTooLong, match=r"3 tokens.*data\.max_prompt_length=2"):
        PromptRenderer(letters, 2, truncation)("abc")
    assert not PromptRenderer(letters, 2, truncation).is_within_limit("abc")


def test_template_error_is_an_environment_failure():
    def reject(content):
        raise ValueError("the chat template rejects a chat with the roles ['tool']")

    with pytest.raises(EnvironmentFailure, match=r"ValueError: .*\['tool'\]"):
        PromptRenderer(reject, 2, "left")([{"role": "tool", "content": "a"}])


def test_samples_of_a_prompt_are_rendered_once_and_do_not_share_a_list(monkeypatch):
    monkeypatch.setattr(context, "CACHE_SIZE", 2)
    rendered = []

    def render(content):
        rendered.append(content)
        return letters(content)

    renderer = PromptRenderer(render, 10, "error")
    first, second = renderer("ab"), renderer("ab")
    assert rendered == ["ab"] and first == second and first is not second
    for content in ("b", "c", "ab"):  # the oldest of three is forgotten
        renderer(content)
    assert rendered == ["ab", "b", "c", "ab"]
