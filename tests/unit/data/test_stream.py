from collections import Counter

from alphaapollo.data.stream import PromptStream, WeightedFileStream, choose_rows


def test_without_shuffle_the_file_order_repeats():
    assert PromptStream(3, seed=0, shuffle=False).prompt_indices(start=2, count=5) == [2, 0, 1, 2, 0]


def test_every_epoch_has_every_prompt_once_in_a_different_order():
    stream = PromptStream(50, seed=1, shuffle=True)
    first, second = stream.prompt_indices(0, 50), stream.prompt_indices(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_position_depends_only_on_seed_and_index():
    whole = PromptStream(7, seed=5, shuffle=True).prompt_indices(0, 40)
    assert [PromptStream(7, seed=5, shuffle=True).prompt_indices(i, 1)[0] for i in range(40)] == whole
    assert PromptStream(7, seed=5, shuffle=True).prompt_indices(13, 20) == whole[13:33]
    assert PromptStream(7, seed=6, shuffle=True).prompt_indices(0, 40) != whole


def test_no_prompts_requested_none_returned():
    assert PromptStream(7, seed=5, shuffle=True).prompt_indices(3, 0) == []


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


def test_mixture_depends_only_on_seed_and_position():
    def mixed(seed: int) -> WeightedFileStream:
        return WeightedFileStream([5, 7], [1.0, 2.5], seed, shuffle=True)

    whole = mixed(3).prompt_indices(0, 90)
    assert [mixed(3).prompt_indices(place, 1)[0] for place in range(90)] == whole
    assert mixed(3).prompt_indices(31, 20) == whole[31:51] and mixed(4).prompt_indices(0, 90) != whole


def test_the_order_of_changed_data_begins_where_the_data_changed():
    for shuffle in (False, True):
        whole = PromptStream(7, seed=5, shuffle=shuffle).prompt_indices(0, 20)
        assert PromptStream(7, seed=5, shuffle=shuffle, start=13).prompt_indices(13, 20) == whole
        files = ([2, 4], [2.0, 0.5], 5, shuffle)
        assert WeightedFileStream(*files, start=13).prompt_indices(13, 9) == WeightedFileStream(*files).prompt_indices(
            0, 9
        )
