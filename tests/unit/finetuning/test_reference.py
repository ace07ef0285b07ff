from pathlib import Path

import numpy as np
import pytest

from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.finetuning.reference import digest_of, give, keep, read_kept
from alphaapollo.types import Row


def row(*ids: int, mask: tuple[int, ...] | None = None) -> Row:
    mask = mask or (0, *[1] * (len(ids) - 1))
    return Row(list(ids), list(mask), [0.0] * len(ids), [len(ids) - 1])


EXAMPLES = [
    PreferenceExample([row(1, 2), row(1, 3, 4)], [True, False]),
    PreferenceExample([row(5, 6)], [True], unrelated=row(5, 7)),
]


def test_what_is_kept_comes_back_under_its_digest_alone(tmp_path: Path):
    path, told = tmp_path / "reference.npz", []
    digest = digest_of(EXAMPLES, "00ff", "float32")
    assert read_kept(path, digest, told.append) is None and not told
    keep(path, digest, np.array([-1.5, -2.5, -0.25, -4.0]))
    assert [file.name for file in tmp_path.iterdir()] == ["reference.npz"]
    give(EXAMPLES, read_kept(path, digest, told.append))
    assert [example.ref_logps for example in EXAMPLES] == [[-1.5, -2.5], [-0.25, -4.0]] and not told
    assert read_kept(path, "other", told.append) is None and "of other data or another model" in told[0]
    for damage in (path.read_bytes()[:-40], b"", b"no archive"):
        told.clear()
        path.write_bytes(damage)
        assert read_kept(path, digest, told.append) is None and "is damaged" in told[0]


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
def test_the_digest_is_of_tokens_masks_weights_and_dtype(changed):
    assert digest_of(*changed) != digest_of(EXAMPLES, "00ff", "float32") == digest_of(EXAMPLES, "00ff", "float32")
