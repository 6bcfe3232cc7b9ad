"""Register the device `sim`, with `torch.sim`, and the backend `simnccl` for its tensors, in this process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerator.build import NAME, build

__all__ = ["SimModule", "Wait", "load", "waits"]


class Wait(NamedTuple):
    """The host waited for the device.

    Attributes:
        what: What it did: "item", "copy to the host", "event.synchronize", an operator.
        where: The innermost line of Python; "" in a thread of torch's own, such as autograd's.
    """

    what: str
    where: str


_waits: list[Wait] = []


def _note(what: str) -> None:
    frame = sys._getframe().f_back
    _waits.append(Wait(what, "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"))


@contextmanager
def waits() -> Iterator[list[Wait]]:
    """Yield a list of the waits of the host within the block, which grows with them."""
    _waits.clear()
    yield _waits


@cache
def load() -> None:
    """Register the device in this process, for good."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    engine.tell_of_waits(_note)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", SimModule())
    torch.utils.generate_methods_for_privateuse1_backend()
    # DDP keeps nodes of the stream that it was made on; on CUDA, too, torch says so to every user of Lightning.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    dist.Backend.register_backend("simnccl", partial(_make_backend, engine), extended_api=True, devices=["sim"])


def _make_backend(engine: Any, options: Any, _: Any) -> Any:
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return engine.Collectives(gloo)


class SimModule(types.ModuleType):
    """`torch.sim`: what torch, Lightning and users ask of the module of a device. Its random numbers are the CPU's."""

    def __init__(self) -> None:
        super().__init__("torch.sim")
        self.Stream, self.Event = torch.Stream, torch.Event
        self.current_stream, self.set_stream = torch.accelerator.current_stream, torch.accelerator.set_stream
        self.synchronize = torch.accelerator.synchronize

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        """Be found: torch 2.11 takes a device without this method for one that was never used."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: Any) -> AbstractContextManager[Any]:
        return torch.accelerator.device_index(torch.device(device).index or 0)

    def stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = "sim") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "sim") -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
