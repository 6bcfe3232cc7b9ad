"""Compile the simulated device once, and keep it in the user's cache folder for later runs with the same source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

__all__ = ["build", "library", "obstacle"]

NAME = "gradavg_simulator"
SOURCE = Path(__file__).parent / "device.cpp"
OLDEST_TORCH = (2, 11)  # the oldest that it was tried with
# Optimizing takes longer than it saves: what computes is torch's own. Without NDEBUG some of torch's structures are not
# those of its releases.
FLAGS = ("-O0", "-g0", "-Wall", "-DNDEBUG", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")


def obstacle() -> str | None:
    """Return what is missing to build the simulator here, or None."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    needs = {
        "torch {}.{} or newer, this is {}".format(*OLDEST_TORCH, torch.__version__): release >= OLDEST_TORCH,
        f"Linux, this is {sys.platform}": sys.platform == "linux",
        "a C++ compiler: install g++": shutil.which(os.environ.get("CXX", "c++")) is not None,
        "ninja: pip install ninja": shutil.which("ninja", path=_path()) is not None,
        "the headers of Python: install python3-dev": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    missing = [what for what, there in needs.items() if not there]
    return f"the simulated accelerator needs {missing[0]}" if missing else None


def library() -> Path:
    """Return where the extension module of these sources and this torch is, or will be."""
    parts = [torch.__version__, sys.version, *FLAGS]
    digest = hashlib.sha256("\0".join(parts).encode() + SOURCE.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lightning-gradavg" / f"simulator-{digest.hexdigest()[:16]}" / f"{NAME}.so"


def build() -> Path:
    """Build the extension module unless it is there, and return where it is.

    Only one process builds; others that want the same wait for it.

    Raises:
        RuntimeError: With the compiler's output, if it does not compile.
    """
    target = library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process and its compiler have ended, however they end
        if not target.exists():
            _compile(target, lock.fileno())
    return target


def _compile(target: Path, lock: int) -> None:
    folder = target.parent / "objects"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # In a process of its own: `load` imports what it has built, and the device would be registered here.
    run = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PATH": _path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        pass_fds=[lock],
    )
    if run.returncode != 0:
        raise RuntimeError(f"the simulator does not compile:\n{run.stdout[-8000:]}")
    (folder / target.name).rename(target)  # all at once: who sees it sees all of it
    shutil.rmtree(folder)


def _path() -> str:
    """Return the search path, with the programs of the packages of this Python: ninja is one of them."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


if __name__ == "__main__":
    from torch.utils.cpp_extension import load

    load(NAME, [str(SOURCE)], build_directory=sys.argv[1], extra_cflags=list(FLAGS), verbose=True)
