"""Checkpoints that survive a kill: written whole or not at all, and read from the last one that is whole."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_gradavg.ranks import World

__all__ = ["WholeCheckpoints", "whole_checkpoint"]


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place, and moves it there when it is on the disk.

    Lightning moves it from the folder for temporary files, which copies where that is another disk, and does not wait
    for the disk: a kill or a loss of power leaves a part of a file, in the place of the checkpoint before. What is not
    on a local file system is left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path).absolute()
        place.parent.mkdir(parents=True, exist_ok=True)
        # One name for each place: what a killed run left is written over. Lightning looks for *.ckpt.
        unfinished = place.with_name(f".{place.name}.unfinished")
        try:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(place)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync_folder(place.parent)


def whole_checkpoint(path: Any, world: World) -> Any:
    """Return the path of a checkpoint, or of the newest whole one beside it if that is torn. A collective operation.

    Rank 0 looks, for all: ranks read one shared folder, or have copies of it. Every byte is checked against the
    checksums that `torch.save` writes. What is not on a local file system is taken for whole.

    Raises:
        ValueError: If it is torn and there is no whole one beside it.
    """
    found, torn = world.from_first(_whole_beside(path) if world.rank == 0 else None)
    if not torn:
        return path
    said = "; ".join(f"{name} is torn ({problem})" for name, problem in torn.items())
    if found is None:
        raise ValueError(
            f"{said}, and there is no whole *.ckpt beside it to go on from. Name another one, or start without."
        )
    rank_zero_warn(f"GradAvgStrategy: {said}: the run goes on from {found}", stacklevel=2)
    return found


def _whole_beside(path: Any) -> tuple[str | None, dict[str, str]]:
    """Return the first whole checkpoint of a path and what is beside it, newest first, and the torn ones before it."""
    torn: dict[str, str] = {}
    if not _is_local(path) or not Path(path).is_file():
        return None, torn
    place = Path(path)
    beside = (other for other in place.parent.glob("*.ckpt") if other.is_file() and not other.samefile(place))
    for candidate in (place, *sorted(beside, key=lambda other: other.stat().st_mtime_ns, reverse=True)):
        problem = _damage(candidate)
        if problem is None:
            return str(candidate), torn
        torn[str(candidate)] = problem
    return None, torn


def _damage(place: Path) -> str | None:
    """Return what is wrong with a file that `torch.save` wrote; None for a whole one, or one of another format."""
    with place.open("rb") as file:
        begin = file.read(2)
    if begin not in (b"PK", b"", b"\0\0"):  # torch.save writes zip archives; blocks that were not written read as zeros
        return None
    try:
        with zipfile.ZipFile(place) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        return f"{place.stat().st_size} bytes, {error}".lower()
    return None if broken is None else f"the checksum of its record {broken!r} does not fit"


def _is_local(path: Any) -> bool:
    return "://" not in str(path)  # as fsspec names other file systems, which have no such files to move and to check


def _sync_folder(folder: Path) -> None:
    """Have the new name on the disk, too, where folders can be opened: not on Windows."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
