import pytest

from alphaapollo.observability.majority_vote import extract_answer


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("42", [r"so \boxed{42}.", "12 + 30 = 42"]),
        ("12", ["7 + 5 = 12\n#### 12"]),
        ("3/4", ["<think>9</think><answer>the result is \\boxed{ 3/4 }</answer>", r"\boxed{\dfrac{6}{8}}"]),
        ("paris", ["<answer> Paris </answer>"]),
        ("1200", ["That makes 1,200 dollars.", r"\boxed{1{,}200.00}", r"\boxed{\$1200}"]),
        ("-1/2", [r"\boxed{-\frac{1}{2}}", r"\boxed{-.5}"]),
        ("1/2", [r"\boxed{0.5}"]),
        ("(1,2)", [r"\boxed{\left( 1,\, 2 \right)}", r"\boxed{(1,2)}"]),
        ("x=3", [r"\boxed{x = 3}"]),
        ("1/0", [r"\boxed{1/0}"]),
        (r"10\%", [r"\boxed{10\%}"]),
        ("nonumberhere", ["no number here"]),
        ("-", [r"\boxed{-}"]),
        ("üüüüü", ["ü" * 5]),
        (None, ["", " \n", r"\boxed{}", "<answer></answer>"]),
    ],
)
def test_answer(answer: str | None, texts: list[str]) -> None:
    assert [extract_answer(text) for text in texts] == [answer] * len(texts)


@pytest.mark.parametrize("text", ["<answer>" * 130_000, "{" * 10**6, "1," * 500_000, "9" * 10**6, "\\boxed{" * 150_000])
def test_a_megabyte_of_repetition_is_read(text: str) -> None:
    assert extract_answer(text)
