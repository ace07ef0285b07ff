import random

from examples.quickstart.task import lesson


def test_carry_rate_decides_whether_sums_are_right():
    right, forgetful = (lesson(457, 386, random.Random(0), carry_rate) for carry_rate in (1.0, 0.0))
    assert right == "7+6=13\n5+8+1=14\n4+3+1=8\n<answer>843</answer>"
    assert forgetful == "7+6=13\n5+8=13\n4+3=7\n<answer>733</answer>"


def test_a_teacher_may_invent_carries():
    assert lesson(111, 222, random.Random(0)) == "1+2=3\n1+2=3\n1+2=3\n<answer>333</answer>"
    assert lesson(111, 222, random.Random(0), wrong_carry_rate=1.0) == "1+2=3\n1+2+1=4\n1+2+1=4\n<answer>443</answer>"
