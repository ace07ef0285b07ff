from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.finetuning.sft import ranks_notice


def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    assert ranks_notice(None, 2) == ranks_notice(tmp_path, 2) == []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "state.json").write_text('{"world_size": 4, "num_steps": 7}')
    assert ranks_notice(tmp_path, 4) == []
    (told,) = ranks_notice(tmp_path, 1)
    assert told.startswith("the checkpoint was written by 4 rank(s), and there are 1 now: the same batches and draws")


def test_a_torn_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "state.json").write_text('{"num_steps": 7}')
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        ranks_notice(tmp_path, 1)
