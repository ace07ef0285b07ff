"""What the trainer computed for each token is read back as it was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from alphaapollo.runs.rollout_log import TrainedRow, pack_trained_rows, read_trained_rows


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "trained_000001.npz"
    logprobs = np.array([-1.0, np.nan, -3.0], np.float32)
    path.write_bytes(
        pack_trained_rows(
            [
                TrainedRow(17, 2, 0, logprobs, np.ones(3, np.float32)),
                TrainedRow(18, 0, 1, None, np.zeros(1, np.float32)),
            ]
        )
    )
    first, second = read_trained_rows(path)
    assert (first.prompt_id, first.sample, first.row) == (17, 2, 0)
    np.testing.assert_array_equal(first.logprobs, logprobs)  # type: ignore[arg-type]
    assert first.get_values(2) == (-3.0, 1.0)
    assert (second.row, second.logprobs, second.get_values(0)) == (1, None, (None, 0.0))


def test_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(pack_trained_rows([]))
    assert read_trained_rows(tmp_path / "a.npz") == []


def test_damaged_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK damaged")
    with pytest.raises(ValueError, match=r"a.npz cannot be read"):
        read_trained_rows(tmp_path / "a.npz")
