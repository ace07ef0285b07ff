import re
from collections import Counter

import numpy as np
import pytest

from alphaapollo.config.schema.data import TrainingFiles
from alphaapollo.data.mixture import describe_mixture, make_stream
from alphaapollo.data.stream import PromptStream, WeightedFileStream, choose_rows

STREAMS = {
    "prompts in order": lambda seed, **start: PromptStream(7, seed, shuffle=False, **start),
    "prompts": lambda seed, **start: PromptStream(7, seed, shuffle=True, **start),
    "files in order": lambda seed, **start: WeightedFileStream([2, 4], [0.7, 0.3], seed, shuffle=False, **start),
    "files": lambda seed, **start: WeightedFileStream([5, 7], [0.2, 0.8], seed, shuffle=True, **start),
}


def test_without_shuffle_the_file_order_repeats():
    assert PromptStream(3, seed=0, shuffle=False).prompt_indices(start=2, count=5) == [2, 0, 1, 2, 0]


def test_every_epoch_has_every_prompt_once_in_a_different_order():
    stream = PromptStream(50, seed=1, shuffle=True)
    first, second = stream.prompt_indices(0, 50), stream.prompt_indices(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


@pytest.mark.parametrize("name", STREAMS)
def test_a_position_depends_only_on_seed_and_index(name):
    """The order of changed data begins where the data changed."""
    make, is_shuffled = STREAMS[name], "order" not in name
    all_indices = make(5).prompt_indices(0, 90)
    assert [make(5).prompt_indices(index, 1)[0] for index in range(90)] == all_indices
    assert make(5).prompt_indices(31, 20) == all_indices[31:51] and make(5).prompt_indices(3, 0) == []
    assert (make(6).prompt_indices(0, 90) != all_indices) == is_shuffled
    assert make(5, start=13).prompt_indices(13, 20) == all_indices[:20]


def test_rows_are_drawn_once_by_the_seed():
    rows = range(1000)
    drawn = choose_rows(rows, 10, seed=1, shuffle=True)
    assert drawn == choose_rows(rows, 10, seed=1, shuffle=True) == sorted(set(drawn))
    assert len(drawn) == 10 and drawn != choose_rows(rows, 10, seed=2, shuffle=True)
    assert max(drawn) > 10


def test_the_first_rows_without_shuffling_and_all_where_there_are_no_more():
    assert choose_rows(range(5), 2, seed=1, shuffle=False) == [0, 1]
    for count in (-1, 0, 5, 6):
        assert choose_rows(range(5), count, seed=1, shuffle=True) == [0, 1, 2, 3, 4]


def test_a_mixture_in_order_of_the_files():
    """An epoch: two thirds of the first file, i.e. two passes; the next epoch has the other half of the second."""
    stream = WeightedFileStream([2, 4], [0.67, 0.33], seed=0, shuffle=False)
    assert (stream.num_prompts, stream.quotas) == (6, [4, 2])
    assert stream.prompt_indices(0, 12) == [0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 4, 5]


@pytest.mark.parametrize(("sizes", "shares"), [([100, 900], [0.7, 0.3]), ([3, 5, 2], [0.1, 0.4, 0.5])])
def test_weights_are_shares_of_the_prompts(sizes, shares):
    """Of each file, every row comes before one comes again."""
    stream, total = WeightedFileStream(sizes, shares, seed=1, shuffle=True), sum(sizes)
    counts, starts = Counter[int](), np.cumsum([0, *sizes])
    for epoch in range(4):
        drawn = stream.prompt_indices(epoch * total, total)
        assert np.histogram(drawn, starts)[0].tolist() == stream.quotas == [round(share * total) for share in shares]
        counts.update(drawn)
        for first, size in zip(starts, sizes, strict=False):
            of_file = [counts[index] for index in range(first, first + size)]
            assert max(of_file) - min(of_file) <= 1


def test_shares_are_checked_with_the_sizes_of_the_files():
    data = TrainingFiles(train_files=["a.jsonl", "b.jsonl"])
    for weights, size, error in (
        ([1.0, 0.25], 20, "=[1.0,0.25]: shares of the trained prompts must sum to 1. Set [0.8,0.2] or, if these are "),
        ([1.0, 0.25], 20, "passes over each file, [0.667,0.333]."),
        ([0.99, 0.01], 20, "b has 20 rows and 0 of the 30 prompts"),
        ([0.9, 0.1], 0, "b has 0 rows and 1 of the 10 prompts"),
    ):
        data = data.model_copy(update={"source_weights": weights})
        with pytest.raises(ValueError, match=re.escape(error)):
            make_stream(data, {0: 10, 1: size}, seed=0)
    first, second = describe_mixture(data, {0: 10, 1: 20}, epochs=2.0).items()
    assert first == ("  a", "10 rows, 90% of the prompts, 5.40 passes") and second[1].endswith("0.30 passes")
