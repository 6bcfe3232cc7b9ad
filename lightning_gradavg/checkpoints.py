"""Checkpoints that survive a kill: written whole or not at all, and read only if they are whole."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

__all__ = ["WholeCheckpoints"]


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place, moves it there when it is on the disk, and refuses to read a damaged one.

    Lightning moves it from the folder for temporary files, perhaps on another disk, and does not wait for the disk: a
    kill or a power cut replaces the previous checkpoint by a part of a file. What is not local is left to Lightning.
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

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        place = Path(path)
        if _is_local(path) and (damage := _damage(place)):
            others = filter(Path.is_file, place.parent.glob("*.ckpt"))
            newest = sorted(others, key=lambda other: other.stat().st_mtime_ns, reverse=True)
            whole = next((other for other in newest if not _damage(other)), "none")
            raise ValueError(
                f"the checkpoint {place} is damaged: {damage}. Train from the start, or pass another one as ckpt_path."
                f" The newest intact one in its folder is {whole}"
            )
        return super().load_checkpoint(path, *args, **kwargs)


def _damage(place: Path) -> str | None:
    """Return what is wrong with an archive of `torch.save`: reading it checks no checksum."""
    try:
        with zipfile.ZipFile(place) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        return f"{place.stat().st_size} bytes, {error}".lower()
    return None if broken is None else f"the checksum of its record {broken!r} does not match"


def _is_local(path: Any) -> bool:
    return "://" not in str(path)  # as fsspec names other file systems, which have no such files to move and to check
