"""The line that says whether an update is right, and the file of its checks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from alphaapollo.runs.update_checks import OLD_CHECKS, Check, read_checks, summarize, write_checks

GOOD, BAD = Check("loss", "", 0.0, 1e-3, ""), Check("weights", "norm", math.nan, 1e-3, "")
OWN = Check("advantages", "", 0.0, 0.0, "the estimator mine", covered=False)


def test_the_summary_names_what_is_not_covered() -> None:
    assert "not covered" not in summarize([GOOD]) and summarize([GOOD]).startswith("1 of 1 ")
    for checks in ([OWN, GOOD], [OWN, BAD]):
        assert summarize(checks).endswith(", not covered: advantages (the estimator mine)")
    assert summarize([OWN, BAD]).startswith("weights differs by nan")


def test_checks_are_read_from_json_lines_also_of_earlier_versions(tmp_path: Path) -> None:
    (tmp_path / OLD_CHECKS).write_text(json.dumps(asdict(GOOD)) + "\n")
    assert read_checks(tmp_path) == [GOOD]
    write_checks(tmp_path, [BAD, OWN])
    assert [check.verdict for check in read_checks(tmp_path)] == ["FAILED", "not covered"]
    assert len((tmp_path / "verification.jsonl").read_text().splitlines()) == 2
