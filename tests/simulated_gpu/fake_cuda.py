"""Fake CUDA: run code that only a GPU selects, in a CPU build of torch, without computing anything.

    with fake_cuda(world_size=8) as gpu:        # in a process that `run_preloaded` starts
        worker = PolicyWorker(...)              # its tensors are fake tensors on "cuda"
        worker.update(columns)
    gpu.syncs, gpu.work     # Counters: host synchronizations (kind, place in alphaapollo); kernels, bytes (work.py)

It detects operations that mix CPU and CUDA tensors, unsupported operators, wrong dtypes and shapes, and waits of the
host for the GPU. Collectives do nothing, on a process group of any size. Small integer tensors have values, because
sizes and indices depend on them; all other values are made up. Kernels, numerics, NCCL and streams are not covered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.simulated_gpu.work import count_work, describe_blocking_copy, outside

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = f"{ROOT}/alphaapollo/"
LARGEST_WITH_VALUES = 1 << 16  # elements of an integer tensor whose values are known
GPU = "NVIDIA H100 80GB HBM3"


def compile_guard(folder: Path) -> Path:
    """Compile guard.cpp against the installed torch. Takes about 20 seconds."""
    torch_folder, library = Path(torch.__file__).parent, folder / "guard.so"
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder}/include"]
    command += [str(Path(__file__).with_name("guard.cpp")), "-o", str(library), f"-L{torch_folder}/lib"]
    command += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run(command, check=True, timeout=300)
    return library


def run_preloaded(library: Path | None, module: str, *words: str, timeout: float = 600, **variables: str) -> str:
    """Run `python -m module words` with the guard (None: without), and return its standard output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": str(library)} if library else {}) | variables
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


class Stream:
    """Stand-in for torch.cuda.Stream. `Stream.current` is the stream on which memory is allocated."""

    device_index = device_type = 0
    count = 0
    current: Stream

    def __init__(self, *_: Any, **__: Any):
        self.device, self.stream_id, self.before = torch.device("cuda", 0), Stream.count, list[Stream]()
        Stream.count += 1

    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        FakeGpu.note("stream.synchronize")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self.before.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before.pop()


class Event:
    """Stand-in for torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any): ...
    def record(self, stream: Stream | None = None) -> Event:
        return self

    def wait(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None:
        FakeGpu.note("event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@contextmanager
def use_stream(stream: Stream | None = None) -> Iterator[None]:
    with stream or Stream.current:
        yield


class FakeGpu(TorchDispatchMode):
    """Mode that counts host synchronizations and keeps the values of small integer tensors."""

    syncs: ClassVar[Counter[tuple[str, str]]] = Counter()
    work: ClassVar[Counter[str]] = Counter()
    hints: ClassVar[list[Callable[[Tensor], Any]]] = []  # tensor -> values for Tensor.tolist, or None
    pinned: ClassVar[set[int]] = set()  # addresses of pinned storages
    fakes: ClassVar[FakeTensorMode]
    DYNAMIC: ClassVar[dict[Any, str]] = {  # operators whose results have sizes that depend on values
        aten.nonzero.default: "nonzero",
        aten._unique2.default: "unique",
        aten.unique_dim.default: "unique",
        aten.unique_consecutive.default: "unique",
        aten.repeat_interleave.Tensor: "repeat_interleave",
        aten.bincount.default: "bincount",
        aten.masked_select.default: "masked_select",
    }

    @staticmethod
    def note(kind: str) -> None:
        """Count a wait of the host for the GPU, by the innermost line of alphaapollo that causes it."""
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        place = f"{frames[-1].filename.removeprefix(PACKAGE)} {frames[-1].name}" if frames else "?"
        FakeGpu.syncs[kind, place] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        real = _compute_values(func, args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        on_gpu = first is not None and first.device.type == "cuda"
        if func is aten._local_scalar_dense.default and isinstance(first, FakeTensor):
            if on_gpu:
                self.note("item")
            made_up = True if first.dtype == torch.bool else 1e-3 if first.is_floating_point() else 1
            return made_up if real is None else real
        if func in self.DYNAMIC and kwargs.get("output_size") is None and isinstance(first, FakeTensor):
            if on_gpu:
                self.note(self.DYNAMIC[func])
            assert real is not None, f"{func} of a tensor without values"
            made = tree_map_only(Tensor, lambda value: first.new_empty(value.shape, dtype=value.dtype), real)
            return _attach_values(made, real)
        if kwargs.get("pin_memory"):
            made = func(*args, **kwargs | {"pin_memory": False})
            self.pinned.add(made.untyped_storage()._cdata)
            return made
        if func is aten.copy_.default and (wait := describe_blocking_copy(self.pinned, *args, **kwargs)):
            self.note(wait)
        if func is aten._pin_memory.default:
            return first
        if func is aten.is_pinned.default:
            return False
        if func is aten.equal.default:
            if on_gpu:
                self.note("equal")
            return True
        if func is aten._to_copy.default and not kwargs.get("non_blocking"):
            target = torch.device(kwargs.get("device") or first.device).type
            if on_gpu and target == "cpu":
                self.note("copy to cpu")
            if not on_gpu and target == "cuda" and first.numel() > 1:
                self.note("pageable copy to cuda")
        if func is aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            if on_gpu:
                self.note("index by a bool mask")
            args = (first, [part for index in args[1] for part in _split_mask(index)])
        made = func(*args, **kwargs)
        count_work(self.work, func, args, made)
        if func._schema.is_mutable:
            if real is None and hasattr(first, "known_values"):
                del first.known_values
            return made
        return made if real is None else _attach_values(made, real)


def _is_mask(index: Tensor | None) -> bool:
    return isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8)


def _split_mask(index: Tensor | None) -> list[Tensor | None]:
    """The index itself or, for a mask, the positions of its ones as one index per dimension."""
    if index is None or not _is_mask(index):
        return [index]
    values = get_values(index)
    with _disable_current_modes():
        count = max(1, index.numel() // 2) if values is None else int((values != 0).sum())
    return [index.new_empty(count, dtype=torch.int64) for _ in range(index.ndim)]


def get_values(tensor: Tensor) -> Tensor | None:
    """The values of a fake tensor, if they are known, or a real tensor of integers itself."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "known_values", None)
    return None if tensor.is_floating_point() else tensor


def _compute_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operator on the known values of its inputs; None if one is unknown."""
    if func.namespace not in ("aten", "prims") or any(word in str(func) for word in ("rand", "empty")):
        return None
    if any(get_values(leaf) is None for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
        return None
    cpu = torch.device("cpu")
    kwargs = {key: cpu if key == "device" and value is not None else value for key, value in kwargs.items()}
    kwargs.pop("pin_memory", None)
    args, kwargs = tree_map_only(Tensor, get_values, (args, kwargs))
    args = tuple(cpu if isinstance(one, torch.device) else one for one in args)
    with _disable_current_modes():
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, IndexError):  # e.g. a collective
            return None


def _attach_values(made: Any, real: Any) -> Any:
    for fake, value in zip(tree_leaves(made), tree_leaves(real), strict=False):
        is_known = isinstance(fake, FakeTensor) and isinstance(value, Tensor) and _has_values(value)
        if is_known and fake.shape == value.shape:
            fake.known_values = value
    return made


def _has_values(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) and value.numel() <= LARGEST_WITH_VALUES


FROM_NUMPY, TENSOR, TOLIST, NUMPY, APPLY = (
    torch.from_numpy,
    torch.tensor,
    Tensor.tolist,
    Tensor.numpy,
    torch.nn.Module._apply,
)


def _make_from_numpy(array: np.ndarray) -> Tensor:
    made = FROM_NUMPY(array)
    if isinstance(made, FakeTensor) and array.dtype.kind in "iub" and array.size <= LARGEST_WITH_VALUES:
        with _disable_current_modes():
            made.known_values = FROM_NUMPY(np.ascontiguousarray(array).copy())
    return made


def _make_tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(data, list):
        data = [one.item() if isinstance(one, Tensor) and one.numel() == 1 else one for one in data]
    made = TENSOR(data, *args, **kwargs)
    if isinstance(made, FakeTensor):
        made.constant = None  # torch would compute with it on the GPU
        if not made.is_floating_point():
            with _disable_current_modes():
                made.known_values = TENSOR(data, dtype=made.dtype)
    return made


def _list_values(tensor: Tensor) -> Any:
    if not isinstance(tensor, FakeTensor):
        return TOLIST(tensor)
    if tensor.device.type == "cuda":
        FakeGpu.note("tolist")
    if (values := get_values(tensor)) is not None:
        return TOLIST(values)
    hinted = next((value for hint in FakeGpu.hints if (value := hint(tensor)) is not None), None)
    made_up = np.ones(tuple(tensor.shape), "float64" if tensor.is_floating_point() else "int64")
    return made_up.tolist() if hinted is None else hinted


def _make_array(tensor: Tensor, *args: Any, **kwargs: Any) -> np.ndarray:
    if not isinstance(tensor, FakeTensor):
        return NUMPY(tensor, *args, **kwargs)
    if tensor.device.type == "cuda":
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if tensor.dtype == torch.bfloat16:
        raise TypeError("Got unsupported ScalarType BFloat16")
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _apply_in_place(root: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """nn.Module._apply that replaces fake parameters instead of swapping them."""
    if not any(isinstance(parameter, FakeTensor) for parameter in root.parameters()):
        return APPLY(root, fn, recurse)
    for store in (store for module in root.modules() for store in (module._parameters, module._buffers)):
        for name, value in list(store.items()):
            if value is None:
                continue
            with torch.no_grad():
                new = fn(value)
            if new.dtype != value.dtype or new.device != value.device:
                is_parameter = isinstance(value, torch.nn.Parameter)
                store[name] = torch.nn.Parameter(new, value.requires_grad) if is_parameter else new
    return root


def _do_nothing(*_: Any, **__: Any) -> None: ...
def _return_zero(*_: Any, **__: Any) -> int:
    return 0


def _synchronize(*_: Any) -> None:
    FakeGpu.note("cuda.synchronize")


def _get_stream(*_: Any) -> Stream:
    return Stream.current


def _list_patches() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for everything in torch that needs a CUDA build."""
    silent = ("set_device", "empty_cache", "ipc_collect", "set_rng_state", "_lazy_init", "reset_peak_memory_stats")
    zero = ("current_device", "_exchange_device", "_maybe_exchange_device", "memory_allocated", "memory_reserved")
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: GPU,
        "get_device_properties": lambda *_: SimpleNamespace(name=GPU, major=9, minor=0, total_memory=80 << 30),
        "mem_get_info": lambda *_: (80 << 30, 80 << 30),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "Stream": Stream,
        "Event": Event,
        "stream": use_stream,
        **dict.fromkeys(("current_stream", "default_stream"), _get_stream),
        "synchronize": _synchronize,
        **dict.fromkeys(silent, _do_nothing),
        **dict.fromkeys((*zero, "max_memory_allocated", "max_memory_reserved"), _return_zero),
    }
    accelerator = {
        "current_device_index": _return_zero,
        "set_device_index": _do_nothing,
        "synchronize": _synchronize,
        "current_stream": _get_stream,
    }
    return [
        *((torch.cuda, name, value) for name, value in cuda.items()),
        *((torch.accelerator, name, value) for name, value in accelerator.items()),
        (Tensor, "pin_memory", lambda tensor, *_: tensor),
        (Tensor, "record_stream", _do_nothing),
        (Tensor, "numpy", _make_array),
        (Tensor, "tolist", _list_values),
        (FakeTensor, "tolist", _list_values),
        (FakeTensorMode, "avoid_device_init", property(lambda mode: True)),
        (torch, "from_numpy", _make_from_numpy),
        (torch, "tensor", _make_tensor),
        (torch, "compile", lambda function, **_: function),
        (torch.nn.Module, "_apply", _apply_in_place),
        (DeviceMesh, "__init__", outside(DeviceMesh.__init__)),
        (DeviceMesh, "_concatenate", staticmethod(outside(DeviceMesh._concatenate))),
        (dist, "broadcast_object_list", _do_nothing),
        (dist, "barrier", lambda *_, **__: FakeGpu.note("barrier")),
    ]


@contextmanager
def fake_cuda(world_size: int = 1, modes: Sequence[TorchDispatchMode] = ()) -> Iterator[FakeGpu]:
    """Context manager in which rank 0 of `world_size` ranks has a fake H100. modes: further modes, e.g. a trace of
    memory. Needs a process that `run_preloaded` started."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import_module("torch.distributed._tools.fake_collectives")  # registers meta functions of collectives
    Stream.current = Stream()
    FakeGpu.syncs.clear()
    FakeGpu.hints.clear()
    with ExitStack() as stack:
        for owner, name, value in _list_patches():
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        FakeGpu.fakes = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        FakeGpu.fakes.static_shapes = True
        gpu = stack.enter_context(FakeGpu())
        for mode in modes:
            stack.enter_context(mode)
        yield gpu
