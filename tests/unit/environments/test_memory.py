from alphaapollo.environments.memory import Step, select_steps


def steps(*pairs: tuple[str, float]) -> list[Step]:
    return [Step(action, [], score) for action, score in pairs]


def chosen(kind, count: int, *pairs: tuple[str, float]) -> list[str]:
    return [step.action for step in select_steps(steps(*pairs), count, kind)]


def test_simple_selects_the_last():
    assert chosen("simple", 2, ("a", 3), ("b", 2), ("c", 1)) == ["b", "c"]
    assert chosen("simple", 9, ("a", 3), ("b", 2)) == ["a", "b"]
    assert select_steps([], 2, "simple") == []


def test_score_selects_the_best_and_the_newest():
    assert chosen("score", 3, ("a", 1), ("b", 5), ("c", 1), ("d", 0)) == ["b", "c", "d"]  # of equal ones the later
    assert chosen("score", 1, ("a", 9), ("b", 0)) == ["b"]


def test_ndimensional_ranks_score_and_brevity_without_duplicates():
    # ranks by (score, length): long .9 (0, 2), short .1 (2, 0), mid .5 (1, 1): all sums 2, the later first
    pairs = [("longer", 0.9), ("s", 0.1), ("mid", 0.5), ("now", 0.0)]
    assert chosen("ndimensional", 3, *pairs) == ["s", "mid", "now"]
    assert chosen("ndimensional", 2, ("best", 0.9), ("worse!", 0.1), ("now", 0.0)) == ["best", "now"]
    assert chosen("ndimensional", 3, ("same", 0.5), ("same", 0.5), ("now", 0.0)) == ["same", "now"]
