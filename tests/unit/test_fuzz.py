"""A small run of `python -m tests.fuzz.check` with fixed cases, and a check that it can fail."""

from pathlib import Path

from tests.fuzz.check import check
from tests.fuzz.verdict import Case, Report


def test_bad_input_is_one_clear_error_or_a_counted_outcome(tmp_path: Path) -> None:
    report = check(chosen_seed=1, cases=40, folder=tmp_path, quick=True)
    assert report.failures == []
    assert report.cases >= 36 and len(report.kinds) == 4


def test_failure_is_detected() -> None:
    def raises(error: Exception) -> Case:
        def attempt() -> str:
            raise error

        return Case("a case", attempt, ("trainer.seed",))

    report = Report()
    for error in (KeyError("x"), ValueError("what?"), UnicodeEncodeError("utf-8", "trainer.seed", 0, 1, "no")):
        report.take("configs", raises(error))
    assert len(report.failures) == 3 and report.kinds["configs"]["failed"] == 3
    report.take("configs", raises(ValueError("trainer.seed: got 1")))
    report.take("configs", Case("a case", lambda: "accepted", ()))
    assert len(report.failures) == 3 and report.kinds["configs"] == {"failed": 3, "refused": 1, "accepted": 1}
