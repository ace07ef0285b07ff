from pathlib import Path

import numpy as np
import pytest

from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.finetuning.dpo import (
    assign_reference_logps,
    compute_reference_digest,
    read_reference_logps,
    save_reference_logps,
)
from alphaapollo.types import Row


def row(*ids: int, mask: tuple[int, ...] | None = None) -> Row:
    mask = mask or (0, *[1] * (len(ids) - 1))
    return Row(list(ids), list(mask), [0.0] * len(ids), [len(ids) - 1])


EXAMPLES = [
    PreferenceExample([row(1, 2), row(1, 3, 4)], [True, False]),
    PreferenceExample([row(5, 6)], [True], unrelated_answer=row(5, 7)),
]


def test_saved_log_probs_are_read_only_with_their_digest(tmp_path: Path):
    path = tmp_path / "reference.npz"
    digest = compute_reference_digest(EXAMPLES, "00ff", "float32")
    assert read_reference_logps(path, digest) is None
    save_reference_logps(path, digest, np.array([-1.5, -2.5, -0.25, -4.0]))
    assert [file.name for file in tmp_path.iterdir()] == ["reference.npz"]
    assign_reference_logps(EXAMPLES, read_reference_logps(path, digest))
    assert [example.ref_logps for example in EXAMPLES] == [[-1.5, -2.5], [-0.25, -4.0]]
    assert read_reference_logps(path, "other") is None
    for damage in (path.read_bytes()[:-40], b"", b"no archive"):
        path.write_bytes(damage)
        assert read_reference_logps(path, digest) is None


@pytest.mark.parametrize(
    "changed",
    [
        ([PreferenceExample([row(1, 2), row(1, 3, 5)], [True, False]), EXAMPLES[1]], "00ff", "float32"),
        ([PreferenceExample([row(1, 2), row(1, 3, 4, mask=(0, 0, 1))], [True, False]), EXAMPLES[1]], "00ff", "float32"),
        (EXAMPLES[:1], "00ff", "float32"),
        (EXAMPLES, "00fe", "float32"),
        (EXAMPLES, "00ff", "bfloat16"),
    ],
)
def test_digest_covers_tokens_masks_weights_and_dtype(changed):
    given = (EXAMPLES, "00ff", "float32")
    assert compute_reference_digest(*changed) != compute_reference_digest(*given) == compute_reference_digest(*given)
