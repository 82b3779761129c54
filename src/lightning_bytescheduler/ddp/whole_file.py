"""Checkpoints that are whole or not there, whenever the process that writes them is killed; and what tells two apart.

Lightning writes to the system's folder for temporary files and moves the file from there. Where that is on another disk
than the checkpoints, as it is where several machines share those, moving is copying: a kill meanwhile leaves half a
checkpoint in the place of the last one. So it is moved to a name of its own beside it, and renamed.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from lightning_bytescheduler.lightning_api import TorchCheckpointIO

__all__ = ["digest_of", "written_whole"]


def digest_of(path: str | Path) -> str:
    """The same for copies of a checkpoint, and another for any other.

    Torch writes an archive whose directory has a check sum of each part, so that little of a large file is read.

    Args:
        path: Of the checkpoint, or its URL. Nothing is told of what another plugin wrote.
    """
    try:
        with fsspec.open(str(path), "rb") as file, zipfile.ZipFile(file) as archive:
            # The name of the file that torch wrote to stands before each part's.
            parts = [(part.filename.partition("/")[2], part.CRC) for part in archive.infolist()]
    except Exception:  # what only the plugin that wrote it can read
        return "unknown"
    return f"{zlib.crc32(repr(parts).encode()):08x}"


@contextmanager
def written_whole(checkpoint_io: object, path: str | Path) -> Iterator[str | Path]:
    """Where to write what is to be at ``path`` afterwards; one process at a time.

    Args:
        checkpoint_io: That writes. Another one than Lightning's own is given ``path`` itself.
        path: Of the checkpoint; a local file is replaced at once, and what is somewhere else is left to Lightning.
    """
    if type(checkpoint_io) is not TorchCheckpointIO or "://" in str(path):
        yield path
        return
    whole = Path(path)
    part = whole.with_name(f".{whole.name}.part")  # of a writer that was killed, it is written over
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(whole)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
