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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils import backend_registration

__all__ = ["AVAILABLE", "BACKEND", "SimAccelerator", "load", "waits"]

AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this torch can have a device whose operators are written in Python."""
BACKEND = "cpu:gloo,sim:gloo"
"""That of a process group for both devices."""

_CPU = torch.device("cpu")
_KEY = "PrivateUse1"
# kDLCPU and kDLExtDev, as DLPack numbers devices.
_ON_CPU = 1
_ON_SIM = 12
_AFTER_DATA = ctypes.sizeof(ctypes.c_void_p)  # where the device stands in a DLTensor
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


_waits: list[str] = []
_NOT_NAMED = (__file__, str(Path(torch.__file__).parent))


def _note_wait() -> None:
    """Note the line of code that has the host wait now."""
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
    if value.numel() == 0:
        return torch.empty(value.shape, dtype=value.dtype)
    return _same_memory(value, _ON_CPU)


def _on_sim(value: Any) -> Any:
    if isinstance(value, Tensor) and not _is_sim(value):
        return _same_memory(value, _ON_SIM)
    return value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return what an operator takes or gives with each value changed: torch's own trees take longer than operators."""
    if type(value) in {list, tuple}:
        return type(value)(_mapped(change, item) for item in value)
    return change(value)


class _Declaration(NamedTuple):
    """What the schema of an operator says."""

    # The names of its arguments.
    names: list[str]
    # Of each argument, whether it is one tensor.
    is_tensor: list[bool]
    # The names of the arguments that it writes.
    written: list[str]
    # Whether its tensors may be on different devices.
    takes_host: bool
    # Whether the host waits for it.
    waits: bool


@cache
def _declared(op: Any) -> _Declaration:
    name = op._schema.name
    arguments = op._schema.arguments
    # The host must know the size or value of a result before it goes on. Of the masks of `index`, torch has made
    # indices with a `nonzero` of its own.
    depends_on_data = not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(op.tags)
    return _Declaration(
        names=[argument.name for argument in arguments],
        is_tensor=[str(argument.type) == "Tensor" for argument in arguments],
        written=[
            argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write
        ],
        takes_host=name.startswith(("aten::copy_", "aten::index", "aten::_foreach_", "aten::_fused_")),
        waits=depends_on_data and name != "aten::index",
    )


def _has_number_for_tensor(declaration: _Declaration, args: tuple[Any, ...]) -> bool:
    """Return whether an argument that is declared as a tensor is a number."""
    for value, is_tensor in zip(args, declaration.is_tensor, strict=False):
        if is_tensor and isinstance(value, (int, float)):
            return True
    return False


def _puts_by_mask(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator writes where a mask is true: the host waits for the number of places."""
    if op._schema.name != "aten::_index_put_impl_":
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU, in the device's memory: the kernel of all that have none of their own."""
    declaration = _declared(op)

    def on_host(value: Any) -> Any:
        # Beside tensors of the device an operator takes numbers of the host, and few take more; as on CUDA.
        if isinstance(value, Tensor) and value.dim() > 0 and not declaration.takes_host and not _is_sim(value):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {op} got {value.device} and sim")
        return _on_host(value)

    host_args = _mapped(on_host, args)
    host_kwargs = {name: _mapped(on_host, value) for name, value in kwargs.items()}
    # Torch hands on a number as a number where the operator takes a tensor, and another of its name takes it.
    operator = op
    if _has_number_for_tensor(declaration, args):
        operator = op.overloadpacket
    with torch.no_grad():
        result = operator(*host_args, **host_kwargs)
    if declaration.waits or _puts_by_mask(op, args):
        _note_wait()
    if op.namespace == "c10d":
        work = result[-1] if isinstance(result, tuple) else result
        work.wait()  # the exchange is over when it was launched, and the host is not told to wait
        return _mapped(_on_sim, result)
    if not declaration.written:
        return _mapped(_on_sim, result)
    on_sim_by_name = dict(zip(declaration.names, args, strict=False)) | kwargs
    on_host_by_name = dict(zip(declaration.names, host_args, strict=False)) | host_kwargs
    for name in declaration.written:
        tensor = on_sim_by_name[name]
        # A result of size 0 is one that the operator makes as large as it needs.
        if isinstance(tensor, Tensor) and tensor.shape != on_host_by_name[name].shape:
            tensor.data = _on_sim(on_host_by_name[name])
    return on_sim_by_name[declaration.written[0]]


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device, from the host or to it."""
    _on_host(target).copy_(_on_host(source))
    from_host = not _is_sim(source)
    to_host = not _is_sim(target)
    # To memory that is not pinned, the host waits whatever it is asked; from there, the driver takes the bytes at once.
    need_not_wait = non_blocking and (from_host or hasattr(target, "pinned"))
    if (from_host or to_host) and not need_not_wait:
        _note_wait()
    return target


def _item(value: Tensor) -> Any:
    _note_wait()
    return _on_host(value).item()


def _empty(make: Callable[..., Tensor], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    """Be `torch.empty`."""
    tensor = make(*args, **kwargs)
    if pin_memory:
        return _pinned(tensor)
    return tensor


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
        _note_wait()


def _module() -> types.ModuleType:
    """Return `torch.sim`: what torch and Lightning ask of the module of a device. Its random numbers are the CPU's."""
    module = types.ModuleType("torch.sim")
    vars(module).update(
        _is_in_bad_fork=lambda: False,
        Stream=SimStream,
        stream=nullcontext,
        current_stream=SimStream,
        _lazy_init=lambda: None,  # torch 2.11 takes a device without this for one that was never used
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=torch.default_generator.manual_seed,
        get_rng_state=lambda device="sim": torch.get_rng_state(),
        set_rng_state=lambda state, device="sim": torch.set_rng_state(state),
    )
    return module


_LIBRARIES: list[torch.library.Library] = []
"""What is registered goes with them."""


@cache
def load() -> None:
    """Register the device with torch, in this process."""
    backend_registration._setup_privateuseone_for_python_backend("sim", _module())
    fallback = torch.library.Library("_", "IMPL")
    aten = torch.library.Library("aten", "IMPL")
    c10d = torch.library.Library("c10d", "IMPL")
    _LIBRARIES.extend((fallback, aten, c10d))
    fallback.fallback(_compute, _KEY)
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
