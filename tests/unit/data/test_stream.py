from collections import Counter

import pytest

from alphaapollo.data.stream import PromptStream, WeightedFileStream, choose_rows

STREAMS = {
    "prompts in order": lambda seed, **start: PromptStream(7, seed, shuffle=False, **start),
    "prompts": lambda seed, **start: PromptStream(7, seed, shuffle=True, **start),
    "files in order": lambda seed, **start: WeightedFileStream([2, 4], [2.0, 0.5], seed, shuffle=False, **start),
    "files": lambda seed, **start: WeightedFileStream([5, 7], [1.0, 2.5], seed, shuffle=True, **start),
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
    """An epoch: the first file twice, half of the second; the next epoch has its other half."""
    stream = WeightedFileStream([2, 4], [2.0, 0.5], seed=0, shuffle=False)
    assert stream.num_prompts == 6
    assert stream.prompt_indices(0, 12) == [0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 4, 5]


def test_weights_are_passes_per_epoch():
    stream = WeightedFileStream([10, 40, 3], [3.0, 0.25, 1.0], seed=1, shuffle=True)
    epochs = [Counter(stream.prompt_indices(epoch * 43, 43)) for epoch in range(4)]
    for epoch in epochs:
        assert all(epoch[index] == 3 for index in range(10)) and all(epoch[index] == 1 for index in range(50, 53))
        assert sum(epoch[index] for index in range(10, 50)) == 10
    assert all(sum(epoch[index] for epoch in epochs) == 1 for index in range(10, 50))
