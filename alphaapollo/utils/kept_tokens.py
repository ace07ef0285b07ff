"""Sets of tokens that a sampler kept with top-p, top-k or min-p (the sampling mask), and their compact encoding."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEPT_TOKENS = "kept_tokens"
"""Key of Completion.columns with KeptTokens, and of Row.columns with their encoding."""
MAX_IDS = 2**24  # of one completion or row: 64 MiB before they are encoded
BITMAP = 0  # a set is encoded as a bitmap, or as the gaps between its sorted ids, of 1, 2 or 4 bytes each
GAP_BYTES = (1, 2, 4)


class TooManyTokensError(ValueError):
    """Error: the kept sets of one completion or row have more than MAX_IDS ids."""


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The ids that the sampler kept at each of T positions, from which it chose the token after the position.

    Example: `KeptTokens.of_sets([[], [3, 9]])`: at position 1 the sampler chose from 3 and 9, at position 0 from all.
    """

    sizes: np.ndarray  # int64 [T]: number of ids at each position; 0: all tokens
    ids: np.ndarray  # int32 [sum sizes], sorted at each position

    def __post_init__(self) -> None:
        if len(self.ids) > MAX_IDS:
            raise TooManyTokensError(
                f"the sampler kept {len(self.ids)} tokens over {np.count_nonzero(self.sizes)} positions of a sequence, "
                f"and at most {MAX_IDS} can be passed to the trainer. Lower rollout.top_p or set rollout.top_k, or set "
                "rollout.sampling_mask=False, which biases the gradients."
            )

    @classmethod
    def of_sets(cls, sets: Sequence[Sequence[int] | np.ndarray]) -> KeptTokens:
        """Build from one sorted set of ids per position."""
        ids = [np.asarray(one, dtype=np.int32) for one in sets]
        return cls(np.array([len(one) for one in ids], dtype=np.int64), np.concatenate([np.zeros(0, np.int32), *ids]))

    @classmethod
    def of_completion(cls, sets: Sequence[Sequence[int]], num_prompt_tokens: int) -> KeptTokens:
        """Build from the set of each sampled token; no token of the prompt was sampled. The last token has no set."""
        return cls.of_sets([()] * (num_prompt_tokens - 1) + [*sets])

    @classmethod
    def concatenate(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Concatenate the positions of several sequences."""
        return cls(np.concatenate([part.sizes for part in parts]), np.concatenate([part.ids for part in parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, positions: slice) -> KeptTokens:
        start, stop, _ = positions.indices(len(self))
        first = int(self.sizes[:start].sum())
        return KeptTokens(self.sizes[start:stop], self.ids[first : first + int(self.sizes[start:stop].sum())])

    def find_outside(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the positions whose set does not contain the token of the same index. tokens: [T]"""
        position = np.repeat(np.arange(len(self)), self.sizes)
        found = np.bincount(position[self.ids == np.asarray(tokens)[position]], minlength=len(self))
        return np.flatnonzero((self.sizes > 0) & (found == 0))

    def encode(self) -> bytes:
        """Encode each set as a bitmap or as gaps between its ids, whichever is shorter."""
        sizes = self.sizes[self.sizes > 0]
        starts = np.cumsum(sizes) - sizes
        before = np.roll(self.ids, 1)
        before[starts] = -1
        gaps = self.ids - before - 1
        largest = np.maximum.reduceat(gaps, starts) if len(starts) else gaps
        kinds = np.select([largest < 2**8, largest < 2**16], [1, 2], 4)
        bitmap_bytes = self.ids[starts + sizes - 1] // 8 + 1
        kinds[bitmap_bytes < kinds * sizes] = BITMAP
        kind_of_id, bitmap_bytes = np.repeat(kinds, sizes), bitmap_bytes[kinds == BITMAP]
        bits = np.zeros(8 * int(bitmap_bytes.sum()), np.uint8)
        bits[self.ids[kind_of_id == BITMAP] + _repeat_first_bits(bitmap_bytes, sizes[kinds == BITMAP])] = 1
        streams = [gaps[kind_of_id == count] for count in GAP_BYTES]
        return b"".join(map(_pack, [self.sizes, kinds, bitmap_bytes, np.packbits(bits), *streams]))

    @classmethod
    def decode(cls, code: bytes) -> KeptTokens:
        """Decode the result of `encode`."""
        all_sizes, kinds, bitmap_bytes, packed, *streams = _unpack(code)
        sizes, kinds = all_sizes[all_sizes > 0].astype(np.int64), kinds.astype(np.int64)
        kind_of_id, starts = np.repeat(kinds, sizes), np.cumsum(sizes) - sizes
        steps = np.zeros(len(kind_of_id), np.int64)
        for count, stream in zip(GAP_BYTES, streams, strict=True):
            steps[kind_of_id == count] = stream
        steps += 1
        total = np.cumsum(steps)
        ids = total - np.repeat(total[starts] - steps[starts], sizes) - 1
        first_bits = _repeat_first_bits(bitmap_bytes.astype(np.int64), sizes[kinds == BITMAP])
        ids[kind_of_id == BITMAP] = np.flatnonzero(np.unpackbits(packed.astype(np.uint8))) - first_bits
        return cls(all_sizes.astype(np.int64), ids.astype(np.int32))


def _repeat_first_bits(bitmap_bytes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the position of each bitmap's first bit among all bitmaps, once for each of its ids."""
    return np.repeat(8 * (np.cumsum(bitmap_bytes) - bitmap_bytes), sizes)


def _pack(values: np.ndarray) -> bytes:
    """Return values >= 0 as the smallest unsigned integers that fit, after their size and number."""
    dtype = np.min_scalar_type(values.max(initial=0))
    return struct.pack("<BI", dtype.itemsize, len(values)) + values.astype(dtype).tobytes()


def _unpack(code: bytes) -> list[np.ndarray]:
    arrays, start = [], 0
    while start < len(code):
        size, count = struct.unpack_from("<BI", code, start)
        arrays.append(np.frombuffer(code, f"<u{size}", count, start + 5))
        start += 5 + size * count
    return arrays
