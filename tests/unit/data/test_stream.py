from alphaapollo.data.stream import PromptStream, choose_rows


def test_without_shuffle_the_file_order_repeats():
    assert PromptStream(3, seed=0, shuffle=False).indices(start=2, count=5) == [2, 0, 1, 2, 0]


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own():
    stream = PromptStream(50, seed=1, shuffle=True)
    first, second = stream.indices(0, 50), stream.indices(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_a_position_is_a_function_of_seed_and_place_alone():
    whole = PromptStream(7, seed=5, shuffle=True).indices(0, 40)
    assert [PromptStream(7, seed=5, shuffle=True).indices(i, 1)[0] for i in range(40)] == whole
    assert PromptStream(7, seed=5, shuffle=True).indices(13, 20) == whole[13:33]
    assert PromptStream(7, seed=6, shuffle=True).indices(0, 40) != whole


def test_no_prompts_asked_none_given():
    assert PromptStream(7, seed=5, shuffle=True).indices(3, 0) == []


def test_rows_are_drawn_once_by_the_seed():
    drawn = choose_rows(1000, 10, seed=1, shuffle=True)
    assert drawn == choose_rows(1000, 10, seed=1, shuffle=True) == sorted(set(drawn))
    assert len(drawn) == 10 and drawn != choose_rows(1000, 10, seed=2, shuffle=True)
    assert max(choose_rows(1000, 10, seed=1, shuffle=True)) > 10


def test_the_first_rows_without_shuffling_and_all_where_there_are_no_more():
    assert choose_rows(5, 2, seed=1, shuffle=False) == [0, 1]
    for count in (-1, 0, 5, 6):
        assert choose_rows(5, count, seed=1, shuffle=True) == [0, 1, 2, 3, 4]
