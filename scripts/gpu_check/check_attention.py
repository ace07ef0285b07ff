"""Each attention kind against a float64 reference: values and gradients, grouped heads, a window, rows of two tokens,
shared prompts. Changing one row changes no bit of the others. Also the speed at 16k tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphaapollo.config.resolve import has_flash_attn
from alphaapollo.models.attention import BACKENDS, AttentionCall
from alphaapollo.models.micro_batch import Packing, SegmentAttentionKeys
from scripts.checks import Untested
from scripts.gpu_check.kit import Kit, relative

LENGTHS = [2, 190, 2, 61, 300, 2]
PREFIXES = [0, 1, 1, 1, 4, 0]  # with shared prompts: the number of each segment's prefix
KINDS = {"cuda": ("varlen", "sdpa", "padded", "flash"), "cpu": ("sdpa", "padded")}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}  # float32 kernels may round their products


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    size: int
    window: int | None
    shared: bool = False

    @property
    def prefixes(self) -> list[int]:
        return PREFIXES if self.shared else list(range(len(LENGTHS)))


SHAPES = [
    Shape(14, 2, 64, None),
    Shape(14, 2, 128, None),
    Shape(8, 8, 64, None),
    Shape(14, 2, 64, 33),
    Shape(14, 2, 64, None, shared=True),
    Shape(14, 2, 64, 33, shared=True),
]


def run(kit: Kit, only: str = "") -> None:
    """Check all kinds, or the kind `only`."""
    kinds = [only] if only else list(KINDS[kit.device])
    for kind in kinds:
        with kit.part(kind):
            check_kind(kit, kind)


def check_kind(kit: Kit, kind: str) -> None:
    if kind == "flash" and not has_flash_attn():
        raise Untested("flash-attn 2 not installed")
    dtypes = [torch.bfloat16] if kit.on_gpu else [torch.float32]
    dtypes += [torch.float32] * (kit.on_gpu and kind == "sdpa")
    for dtype in dtypes:
        shapes = [shape for shape in SHAPES if shape.shared or kind != "padded"]  # padded rows have no packing
        worst = max(compare(kind, shape, kit.device, dtype) for shape in shapes)
        kit.record(f"{kind} {str(dtype).removeprefix('torch.')}", worst)
        assert worst < TOLERANCE[dtype], f"{kind} in {dtype}: {worst:.2g} from the reference"
    if kind != "padded":
        check_rows_are_apart(kind, kit.device, dtypes[0])
        measure_speed(kit, kind, dtypes[0])


def measure_speed(kit: Kit, kind: str, dtype: torch.dtype) -> None:
    """FLOP/s of forward and backward passes over rows of equal length, with the heads of Qwen2.5 7B."""
    count, length = (16, 1024) if kit.on_gpu else (2, 64)
    sizes = [(1, heads, count * length, 128) for heads in (28, 4, 4)]
    tensors = [torch.randn(size, device=kit.device, dtype=dtype, requires_grad=True) for size in sizes]
    rows = Packing(_ends([length] * count).to(kit.device), [length] * count)
    direction = torch.randn(1, count * length, 28, 128, device=kit.device, dtype=dtype)

    def attend() -> None:
        output = BACKENDS[kind](AttentionCall("check", *tensors, packing=rows))  # type: ignore[index]
        torch.autograd.grad(output, tensors, direction)

    flops = 3.5 * 2 * count * length**2 * 28 * 128  # causal: half of the pairs; the backward pass is 2.5 forward passes
    kit.record(f"{kind} tflops", flops / kit.time(attend) / 1e12)


def inputs(shape: Shape, device: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = sum(LENGTHS)
    sizes = [(1, heads, width, shape.size) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    return [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]


def packing(device: str, shape: Shape) -> Packing:
    ends = _ends(LENGTHS)
    if not shape.shared:
        return Packing(ends.to(device), LENGTHS)
    own = [torch.arange(int(ends[i]), int(ends[i + 1])) for i in range(len(LENGTHS))]
    seen = [own[i] if prefix == i else torch.cat([own[prefix], own[i]]) for i, prefix in enumerate(PREFIXES)]
    lengths = [len(one) for one in seen]
    keys = SegmentAttentionKeys(PREFIXES, lengths, _ends(lengths).to(device), torch.cat(seen).to(device))
    return Packing(ends.to(device), LENGTHS, keys)


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def compare(kind: str, shape: Shape, device: str, dtype: torch.dtype) -> float:
    """Largest relative error of output and gradients."""
    ours = inputs(shape, device, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    call = AttentionCall("check", *ours, window=shape.window, packing=packing(device, shape))
    outputs = [BACKENDS[kind](call), written_out(exact, shape)]  # type: ignore[index]
    for output in outputs:
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
        (output * direction.to(output.dtype)).sum().backward()
    pairs = [(outputs[0], outputs[1]), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    return max(relative(a.detach(), b.detach()) for a, b in pairs if a is not None and b is not None)


def written_out(tensors: list[Tensor], shape: Shape) -> Tensor:
    """Reference attention, [1, T, heads, d] in the dtype of the inputs."""
    query, key, value = tensors
    groups = shape.heads // shape.kv_heads
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    lengths, prefixes = torch.tensor(LENGTHS), torch.tensor(shape.prefixes)
    before = torch.where(prefixes == torch.arange(len(LENGTHS)), 0, lengths[prefixes])
    row = torch.repeat_interleave(lengths).to(query.device)
    prefix = prefixes.to(query.device)[row]
    position = torch.cat([torch.arange(int(n)) + b for n, b in zip(lengths, before, strict=True)]).to(query.device)
    distance = position[:, None] - position
    seen = ((row[:, None] == row) | (prefix[:, None] == row)) & (distance >= 0)
    if shape.window is not None:
        seen &= distance < shape.window
    scores = (query @ key.transpose(2, 3)) * shape.size**-0.5
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def check_rows_are_apart(kind: str, device: str, dtype: torch.dtype) -> None:
    shape, changed = SHAPES[0], slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    first = [tensor.detach() for tensor in inputs(shape, device, dtype)]
    second = [tensor.clone() for tensor in first]
    for tensor in second:
        tensor[:, :, changed] += 1
    with torch.no_grad():
        calls = (AttentionCall("check", *tensors, packing=packing(device, shape)) for tensors in (first, second))
        a, b = (BACKENDS[kind](call) for call in calls)  # type: ignore[index]
    others = torch.ones(sum(LENGTHS), dtype=torch.bool, device=device)
    others[changed] = False
    assert torch.equal(a[:, others], b[:, others]), f"{kind}: changing one row changed others"
    assert not torch.equal(a, b)
