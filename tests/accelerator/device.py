"""Registers the device `sim`, with `torch.sim`, and the backend `simnccl` for its tensors, in this process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import types
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lightning_gradavg
from accelerator.build import NAME, build

__all__ = ["SimModule", "load", "wire"]

TESTS = Path(__file__).resolve().parents[1]
HARNESS = ("accelerator", "ranks.py", "conftest.py", "toys.py")


@cache
def load() -> Any:
    """Register the device in this process, for good, and return the extension module."""
    path = build()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    engine.watch(
        [str(Path(lightning_gradavg.__file__).resolve().parent), str(TESTS)], [str(TESTS / name) for name in HARNESS]
    )
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", SimModule(engine))
    torch.utils.generate_methods_for_privateuse1_backend()
    # DDP keeps nodes of the stream that it was made on; on CUDA, too, torch says so to every user of Lightning.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    dist.Backend.register_backend("simnccl", partial(_make_backend, engine), extended_api=True, devices=["sim"])
    return engine


def wire() -> Any:
    """Return what the ranks of the world talk over, or None where there is no world."""
    return _wires[-1] if _wires else None


class SimModule(types.ModuleType):
    """`torch.sim`: what torch, Lightning and users ask of the module of a device."""

    def __init__(self, engine: Any) -> None:
        super().__init__("torch.sim")
        self.default_generators = (engine.default_generator(),)
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
        self.default_generators[0].manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = "sim") -> torch.Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "sim") -> None:
        self.default_generators[0].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_wires: list[Any] = []


def _make_backend(engine: Any, options: Any, _: Any) -> Any:
    if not dist.is_initialized():  # the world itself
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        _wires.append(engine.Wire(gloo))
    if not _wires:
        raise RuntimeError('a group of "simnccl" needs the world to have it, too: "cpu:gloo,sim:simnccl"')
    ranks = options.global_ranks_in_group or range(options.group_size)
    return engine.SimNccl(_wires[-1], options.group_id, list(ranks), options.group_rank, options.timeout)
