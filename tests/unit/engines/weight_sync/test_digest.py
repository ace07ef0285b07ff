"""Expected digests are computed with Python integers."""

import random

import numpy as np
import pytest
import torch

from alphaapollo.engines.weight_sync.digest import MODULUS, compute_joint_digest, format_digest


def hash_by_hand(value: float) -> int:
    """One element: float32 bits, sign-extended to 64; twice: times an odd number, then the high bits folded down."""
    x = int(np.float32(value).view(np.int32)) % MODULUS
    for multiplier, shift in ((-7046029254386353131, 32), (-4658895280553007687, 29)):
        x = x * multiplier % MODULUS
        signed = x - MODULUS if x >> 63 else x
        x = (signed ^ (signed >> shift)) % MODULUS
    return x


def test_against_python_integers():
    values = [1.0, -2.5, 3e-20, 0.1]
    expected = sum(map(hash_by_hand, values)) % MODULUS
    assert compute_joint_digest([torch.tensor(values)]) == expected
    assert format_digest(expected) == f"{expected:016x}" and format_digest(-1) == "f" * 16


def test_digest_ignores_layout():
    weights = torch.randn(300, 500)  # more than one chunk
    digest = compute_joint_digest([weights])
    assert compute_joint_digest([weights.t()]) == digest  # not contiguous
    assert compute_joint_digest([weights.flatten()[torch.randperm(150_000)]]) == digest
    assert compute_joint_digest(weights.chunk(7)) == digest
    assert compute_joint_digest([weights[:100], weights[100:, :200], weights[100:, 200:]]) == digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_bit_changes_the_digest_and_a_wider_dtype_does_not(dtype):
    weights = torch.randn(4096, dtype=dtype)
    digest = compute_joint_digest([weights])
    assert compute_joint_digest([weights.float()]) == digest
    bits = weights.view(torch.int32 if dtype == torch.float32 else torch.int16)
    for place in random.Random(0).sample(range(4096), 200):
        bits[place] ^= 1  # the last bit of the mantissa
        assert compute_joint_digest([weights]) != digest
        bits[place] ^= 1
    assert compute_joint_digest([weights]) == digest


def test_changes_with_an_equal_sum_are_detected():
    assert compute_joint_digest([torch.tensor([1.0, 4.0])]) != compute_joint_digest([torch.tensor([2.0, 3.0])])
    assert compute_joint_digest([torch.tensor([1.0])]) != compute_joint_digest([torch.tensor([-1.0])])
    assert compute_joint_digest([torch.tensor([1.0, 1.0])]) != compute_joint_digest([torch.tensor([1.0])])
