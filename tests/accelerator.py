"""A simulated device: what the package does with tensors that are not on the CPU, seen on any machine without a GPU.

Torch's reducer, autograd and optimizers, Lightning's Trainer and this package run on the device `sim` unmodified. Its
memory is the CPU's, the CPU computes every operator in place, and gloo reduces. An operator on tensors of two devices
is an error, as on CUDA, and `waits()` lists each time the host would wait for CUDA. It has no streams that could race,
no sparse tensors, no autocast and no static graph: run `make gpu` for those.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import compress, repeat
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils import backend_registration

__all__ = ["AVAILABLE", "BACKEND", "SimAccelerator", "load", "waits"]

AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this torch can have a device whose operators are written in Python."""
BACKEND = "cpu:gloo,sim:gloo"
"""That of a process group for both devices."""

_CPU, _KEY = torch.device("cpu"), "PrivateUse1"
_ON_CPU, _ON_SIM = 1, 12  # kDLCPU and kDLExtDev, as DLPack numbers devices
_AFTER_DATA = ctypes.sizeof(ctypes.c_void_p)  # where the device stands in a DLTensor
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


_waits: list[str] = []
_NOT_NAMED = (__file__, str(Path(torch.__file__).parent))


def _note() -> None:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_NAMED):
        frame = frame.f_back
    _waits.append("" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}")


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list, which grows, of the lines within the block where the host waits for the device.

    Each is the innermost one that is not torch's, or "" in a thread of torch's own, such as autograd's.
    """
    _waits.clear()
    yield _waits


def _is_sim(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "sim"


def _same_memory(tensor: Tensor, device: int) -> Tensor:
    """Return the memory of a tensor as a tensor of another device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + _AFTER_DATA).value = device
    found: Tensor = torch._C._from_dlpack(capsule)
    return found


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU
    if not _is_sim(value):
        return value
    return _same_memory(value, _ON_CPU) if value.numel() else torch.empty(value.shape, dtype=value.dtype)


def _on_sim(value: Any) -> Any:
    return _same_memory(value, _ON_SIM) if isinstance(value, Tensor) and not _is_sim(value) else value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return what an operator takes or gives with each value changed: torch's own trees take longer than operators."""
    return type(value)(_mapped(change, one) for one in value) if type(value) in {list, tuple} else change(value)


@cache
def _declared(op: Any) -> tuple[list[str], list[bool], list[str], bool, bool]:
    """Return names of arguments, which are one tensor, which are written, if devices may differ, and if it waits."""
    name, arguments = op._schema.name, op._schema.arguments
    return (
        [one.name for one in arguments],
        [str(one.type) == "Tensor" for one in arguments],
        [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write],
        name.startswith(("aten::copy_", "aten::index", "aten::_foreach_", "aten::_fused_")),
        # The host must know the size or value of a result before it goes on. Of the masks of `index`, torch has made
        # indices with a `nonzero` of its own.
        name != "aten::index"
        and not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(op.tags),
    )


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU, in the device's memory: the kernel of all that have none of their own."""
    names, takes_tensor, written, differ, waits = _declared(op)

    def on_host(value: Any) -> Any:
        # Beside tensors of the device an operator takes numbers of the host, and few take more; as on CUDA.
        if isinstance(value, Tensor) and value.dim() and not (differ or _is_sim(value)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {op} got {value.device} and sim")
        return _on_host(value)

    host_args, host_kwargs = _mapped(on_host, args), {name: _mapped(on_host, each) for name, each in kwargs.items()}
    # Torch hands on a number as a number where the operator takes a tensor, and another of its name takes it.
    numbers = any(map(isinstance, compress(args, takes_tensor), repeat((int, float))))
    with torch.no_grad():
        found = (op.overloadpacket if numbers else op)(*host_args, **host_kwargs)
    by_mask = op._schema.name == "aten::_index_put_impl_" and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    )
    if waits or by_mask:
        _note()
    if op.namespace == "c10d":
        work = found[-1] if isinstance(found, tuple) else found
        work.wait()  # the exchange is over when it was launched, and the host is not told to wait
        return _mapped(_on_sim, found)
    given, of_host = (dict(zip(names, a, strict=False)) | k for a, k in ((args, kwargs), (host_args, host_kwargs)))
    for name in written:
        # A result of size 0 is one that the operator makes as large as it needs.
        if isinstance(given[name], Tensor) and given[name].shape != of_host[name].shape:
            given[name].data = _on_sim(of_host[name])
    return given[written[0]] if written else _mapped(_on_sim, found)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _on_host(target).copy_(_on_host(source))
    from_host, to_host = not _is_sim(source), not _is_sim(target)
    # To memory that is not pinned, the host waits whatever it is asked; from there, the driver takes the bytes at once.
    if (from_host or to_host) and not (non_blocking and (from_host or hasattr(target, "pinned"))):
        _note()
    return target


def _item(value: Tensor) -> Any:
    _note()
    return _on_host(value).item()


def _empty(make: Callable[..., Tensor], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    return _pinned(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)


def _pinned(tensor: Tensor) -> Tensor:
    pinned: Any = tensor.clone()
    pinned.pinned = True
    return pinned


class SimStream:
    """All that is launched is over at once."""

    def __init__(self, device: torch.device) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self) -> SimStream:
        """Return what serves as an event."""
        return self

    def synchronize(self) -> None:
        """Wait, on the host."""
        _note()


def _module() -> types.ModuleType:
    """Return `torch.sim`: what torch and Lightning ask of the module of a device. Its random numbers are the CPU's."""
    module = types.ModuleType("torch.sim")
    vars(module).update(
        _is_in_bad_fork=lambda: False,
        Stream=SimStream,
        stream=nullcontext,
        current_stream=SimStream,
        _lazy_init=lambda: None,  # torch 2.11 takes a device without this for one that was never used
        **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.default_generator.manual_seed),
        get_rng_state=lambda device="sim": torch.get_rng_state(),
        set_rng_state=lambda state, device="sim": torch.set_rng_state(state),
    )
    return module


_LIBRARIES: list[torch.library.Library] = []
"""What is registered goes with them."""


@cache
def load() -> None:
    backend_registration._setup_privateuseone_for_python_backend("sim", _module())
    every, aten, c10d = (torch.library.Library(name, "IMPL") for name in ("_", "aten", "c10d"))
    _LIBRARIES.extend((every, aten, c10d))
    every.fallback(_compute, _KEY)
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in ("as_strided", "view", "unfold"):  # the CPU's share the memory of any device
        aten.impl(name, partial(getattr(torch.ops.aten, name).default.redispatch, on_cpu), _KEY)
    aten.impl("_copy_from", _copy_from, _KEY)
    aten.impl("_local_scalar_dense", _item, _KEY)
    for name in ("allreduce_", "broadcast_", "allgather_", "alltoall_base_"):
        c10d.impl(name, partial(_compute, getattr(torch.ops.c10d, name).default), _KEY, allow_override=True)
    torch.empty = partial(_empty, torch.empty)
    Tensor.pin_memory = _pinned  # type: ignore[assignment]  # simulated
    # Lightning makes DDP on a side stream, which it asks `torch.cuda` for.
    vars(torch.cuda).update(Stream=lambda: None, stream=lambda _: nullcontext())
    # DDP keeps nodes of the stream that it was made on; on CUDA, too, torch says so to every user of Lightning.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)


class SimAccelerator(CPUAccelerator):
    """One simulated device per process, whatever the number of ranks on a node: as with CUDA_VISIBLE_DEVICES."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing is to be done."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("sim", 0)] * devices

    @staticmethod
    def name() -> str:
        return "sim"
