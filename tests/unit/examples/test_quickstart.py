import itertools
import random
from collections import Counter

from examples.quickstart.task import balanced, carries, lesson, pairs


def test_a_teacher_who_knows_everything_is_right_and_one_who_knows_nothing_carries_the_wrong_way_round():
    right, wrong = (lesson(457, 386, random.Random(0), knows) for knows in (1.0, 0.0))
    assert right == "7+6=13\n5+8+1=14\n4+3+1=8\n<answer>843</answer>"
    assert wrong == "7+6=13\n5+8=13\n4+3=7\n<answer>733</answer>"
    assert lesson(111, 222, random.Random(0), 0.0) == "1+2=3\n1+2+1=4\n1+2+1=4\n<answer>443</answer>"


def test_balanced_pairs_have_every_kind_of_carry_equally_often():
    assert carries(457, 386) == (True, True)
    assert carries(451, 386) == (False, True)
    some = itertools.islice(balanced(pairs(random.Random(0), want_held_out=False)), 40)
    assert Counter(carries(*pair) for pair in some) == dict.fromkeys(itertools.product((False, True), repeat=2), 10)
