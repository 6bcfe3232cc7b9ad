"""Checkpoints that survive a kill: written whole or not at all, and read only if they are whole."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_gradavg.ranks import World

__all__ = ["WholeCheckpoints", "require_whole"]


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place, and moves it there when it is on the disk.

    Lightning moves it from the folder for temporary files, perhaps on another disk, and does not wait for the disk: a
    kill or a power cut replaces the previous checkpoint by a part of a file. Lightning writes what is not local.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path).absolute()
        place.parent.mkdir(parents=True, exist_ok=True)
        # One name for each place, so that the next run overwrites what a killed one left. Lightning looks for *.ckpt.
        unfinished = place.with_name(f".{place.name}.unfinished")
        try:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(place)
        finally:
            unfinished.unlink(missing_ok=True)
        if os.name == "posix":  # the new name, too; Windows opens no folders
            folder = os.open(place.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


def require_whole(path: Any, world: World) -> None:
    """Raise a ValueError on all ranks if a checkpoint is torn: rank 0 reads every byte. A collective operation."""
    problem = world.from_first(_problem(Path(path)) if world.rank == 0 and _is_local(path) else None)
    if problem is not None:
        raise ValueError(problem)


def _problem(place: Path) -> str | None:
    damage = _damage(place)
    if damage is None:
        return None
    beside = sorted(place.parent.glob("*.ckpt"), key=lambda other: other.stat().st_mtime_ns, reverse=True)
    whole = next((other for other in beside if _damage(other) is None), "none")
    advice = f"Train from the start, or pass another one as ckpt_path. The newest intact one in its folder is {whole}"
    return f"the checkpoint {place} is damaged: {damage}. {advice}"


def _damage(place: Path) -> str | None:
    if not place.is_file():
        return None
    with place.open("rb") as file:
        begin = file.read(2)
    if begin not in (b"PK", b"", b"\0\0"):  # torch.save writes zip archives; blocks that were not written read as zeros
        return None
    try:
        with zipfile.ZipFile(place) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        return f"{place.stat().st_size} bytes, {error}".lower()
    return None if broken is None else f"the checksum of its record {broken!r} does not match"


def _is_local(path: Any) -> bool:
    return "://" not in str(path)  # as fsspec names other file systems, which have no such files to move and to check
