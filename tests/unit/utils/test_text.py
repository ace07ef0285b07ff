import pytest
from pydantic import ValidationError

from alphaapollo.config.schema import Rollout
from alphaapollo.utils.text import cut_at_stop, fill_template


@pytest.mark.parametrize(
    ("text", "stop", "before", "including"),
    [
        ("42\n\nQuestion: 1", ["\n\nQuestion:"], "42", "42\n\nQuestion:"),
        ("a</x> b", ["</x>"], "a", "a</x>"),
        ("a END b STOP", ["STOP", "END"], "a ", "a END"),  # the first in the text, not in the list
        ("abcd", ["abcd", "bc"], "a", "abc"),  # the one that is complete first
        ("abc", ["bc", "abc"], "", "abc"),
        ("no", ["stop"], "no", "no"),
        ("no", [], "no", "no"),
        ("", ["\n"], "", ""),
    ],
)
def test_text_ends_at_the_stop_string_that_is_complete_first(text, stop, before, including):
    assert cut_at_stop(text, stop) == before
    assert cut_at_stop(text, stop, includes_stop=True) == including


@pytest.mark.parametrize(
    ("stop", "strings"), [([], ()), ("", ()), ("\n", ("\n",)), (["a", "b c"], ("a", "b c")), (("x",), ("x",))]
)
def test_one_string_or_a_list(stop, strings):
    assert Rollout(stop=list(stop) if isinstance(stop, tuple) else stop).stop_strings == strings


def test_an_empty_string_in_a_list_is_an_error():
    with pytest.raises(ValidationError, match="stop"):
        Rollout(stop=["a", ""])


def test_braces_in_values_and_of_other_names_stay():
    filled = fill_template("Q {question} A {answer} {other}", question="{answer}?", answer="{question}")
    assert filled == "Q {answer}? A {question} {other}"
