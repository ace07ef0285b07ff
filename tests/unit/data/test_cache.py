"""Cache of what is read from many rows: when an entry is used, and when it is not."""

import os
from collections import Counter

import pytest

from alphaapollo.data import cache
from alphaapollo.data.cache import load_or_compute
from alphaapollo.data.rendering import Renderer
from alphaapollo.types import Row


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ALPHAAPOLLO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "MIN_SECONDS", 0.0)
    return tmp_path / "cache"


def count_calls(renderer, *inputs):
    """Return how often the result is computed when it is asked for twice."""
    calls = []

    def compute():
        calls.append(1)
        return Row([1, 2], [0, 1], [0.0, 0.0], [1])

    rows = [load_or_compute(renderer, each, compute) for each in (inputs or ("rows", "rows"))]
    assert all([*row.token_ids] == [1, 2] for row in rows) and type(rows[0].token_ids) is type(rows[1].token_ids)
    return len(calls)


def test_a_result_is_computed_once(folder, make_tokenizer):
    assert count_calls(Renderer(make_tokenizer())) == 1
    assert count_calls(Renderer(make_tokenizer())) == 0, "another process finds it"
    assert count_calls(Renderer(make_tokenizer()), {"a": [1]}, {"a": [2]}) == 2


def add_token(tokenizer):
    tokenizer.add_tokens(["<new>"])
    return tokenizer


OTHERS = {
    "template": lambda make: Renderer(make("{{ messages }}")),
    "arguments": lambda make: Renderer(make(), {"enable_thinking": False}),
    "vocabulary": lambda make: Renderer(add_token(make())),
    "code": lambda make: Renderer(make()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_renderer_vocabulary_or_code_computes_again(other, folder, make_tokenizer, monkeypatch):
    assert count_calls(Renderer(make_tokenizer())) == 1
    if other == "code":
        monkeypatch.setattr(cache, "version", lambda name: "0")
    assert count_calls(OTHERS[other](make_tokenizer)) == 1


@pytest.mark.parametrize("damage", [b"", b"damaged", b"0" * 100])
def test_a_damaged_entry_is_written_again(damage, folder, renderer):
    assert count_calls(renderer) == 1
    (entry,) = folder.iterdir()
    right = entry.read_bytes()
    for content in (damage, right[: len(right) // 2], right[:-1] + b"!"):
        entry.write_bytes(content)
        assert count_calls(renderer) == 1
        assert entry.read_bytes() == right and count_calls(renderer) == 0


def test_a_folder_that_cannot_be_used_is_no_error(folder, renderer):
    folder.write_text("a file")
    assert count_calls(renderer) == 2


def test_an_entry_of_another_user_is_not_read(folder, renderer, monkeypatch):
    assert count_calls(renderer) == 1
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert count_calls(renderer) == 2


def test_entries_that_were_not_used_for_longest_are_removed(folder, renderer, monkeypatch):
    count_calls(renderer, "a", "a")
    (first,) = folder.iterdir()
    os.utime(first, (1, 1))
    count_calls(renderer, "b", "b")
    (second,) = {*folder.iterdir()} - {first}
    os.utime(second, (2, 2))
    count_calls(renderer, "a", "a")  # uses the first again
    size = first.stat().st_size
    monkeypatch.setattr(cache, "MAX_BYTES", 2 * size)
    count_calls(renderer, "c", "c")
    assert first.exists() and not second.exists() and len([*folder.iterdir()]) == 2


def test_counters_of_the_renderer_count_what_was_counted(folder, make_tokenizer):
    for _ in range(2):
        renderer = Renderer(make_tokenizer())
        renderer.control_strings = Counter({"<|im_end|>": 1})
        load_or_compute(renderer, "rows", lambda: renderer.control_strings.update(["<|im_end|>", "<|im_start|>"]))  # noqa: B023
        assert renderer.control_strings == {"<|im_end|>": 2, "<|im_start|>": 1}
