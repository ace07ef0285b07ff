from examples.preferences.make_pairs import CARRY, right


def test_the_examples_pairs_are_named_by_their_carries() -> None:
    texts = {(123, 456): 0, (125, 416): 1, (185, 416): 2, (501, 111): 0}
    assert {pair: len(CARRY.findall(right(*pair))) for pair in texts} == texts
