from alphaapollo.utils.seeds import derive_seeds


def test_repeats_have_seeds_of_their_own():
    seeds = derive_seeds(7, [3, 4, 3, 3])
    assert seeds[:2] == [7, 7] and len({*seeds}) == 3 and derive_seeds(7, [4, 3, 3])[1:] == [7, seeds[2]]
