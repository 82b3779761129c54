"""The reader of .npy files: a row of the array is a sample."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_bytescheduler.data.chunks import Bytes
from lightning_bytescheduler.data.stream import SliceStream

__all__ = ["NpyHeader", "npy_blocks", "npy_slice"]

_BEFORE_LENGTH = 8  # magic and version

# NumPy parses headers with `ast`, which CPython up to 3.11 does not do on two threads at once: now and then one of them
# gets a SystemError ("AST constructor recursion depth mismatch"). Held for nothing else.
_PARSING = threading.Lock()


class NpyHeader:
    """What stands before the rows of a .npy file.

    Args:
        content: The first bytes of the file, at least the header's.

    Raises:
        ValueError: If it is no .npy file whose rows lie one after the other, or one of Python objects.
        EOFError: If the header is longer than ``content``.
    """

    def __init__(self, content: bytes) -> None:
        if len(content) < _BEFORE_LENGTH and np.lib.format.MAGIC_PREFIX.startswith(content[:6]):
            raise EOFError("The header of a .npy file is cut short.")
        version = np.lib.format.read_magic(io.BytesIO(content[:_BEFORE_LENGTH]))
        width = 2 if version == (1, 0) else 4
        rows_at = _BEFORE_LENGTH + width + int.from_bytes(content[_BEFORE_LENGTH : _BEFORE_LENGTH + width], "little")
        if len(content) < max(_BEFORE_LENGTH + width, rows_at):
            raise EOFError("The header of a .npy file is cut short.")
        file = io.BytesIO(content[_BEFORE_LENGTH:rows_at])
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"Version {version} of .npy is not read; save the array again, without named fields.")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with _PARSING:
            shape, fortran_order, dtype = read(file)
        if not shape:
            raise ValueError("The array has no dimension and hence no rows.")
        if fortran_order and len(shape) > 1:
            raise ValueError("The array is in Fortran order, where rows do not lie together; save it in C order.")
        if dtype.hasobject:
            raise ValueError("The array holds Python objects, which are not read, as that could run any code.")
        self.dtype = dtype
        self.content = content[:rows_at]
        self.rows: int = shape[0]
        self.row_shape: tuple[int, ...] = shape[1:]
        self.row_bytes = int(np.prod(self.row_shape, dtype=np.int64)) * dtype.itemsize
        if not self.row_bytes:
            raise ValueError(f"Rows of shape {self.row_shape} are empty.")

    def rows_of(self, content: Bytes) -> np.ndarray[Any, Any]:
        """The rows in ``content``, as an array that shares its memory."""
        rows = len(content) // self.row_bytes
        return np.frombuffer(content, self.dtype).reshape((rows, *self.row_shape))


def npy_slice(rows: np.ndarray[Any, Any]) -> bytes:
    """The content of a .npy file with these rows."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(rows), allow_pickle=False)
    return file.getvalue()


def npy_blocks(stream: SliceStream) -> Iterator[Any]:
    """A row is a sample: an array that shares the memory of its chunk, which for local data is the mapped file.

    As many rows are in a block as a chunk holds.
    """
    chunks = stream.chunks()
    header, start = _header_and_rest(chunks)
    row = bytearray()  # one that is divided between chunks
    for chunk in itertools.chain((start,), chunks):
        view = memoryview(chunk)
        if row:
            missing = header.row_bytes - len(row)
            row += view[:missing]
            view = view[missing:]
            if len(row) < header.row_bytes:
                continue
            yield header.rows_of(row)
        whole = len(view) - len(view) % header.row_bytes
        if whole:
            yield header.rows_of(view[:whole])
        row = bytearray(view[whole:])
    if row:
        raise ValueError("The last row is cut short.")


def _header_and_rest(chunks: Iterator[Bytes]) -> tuple[NpyHeader, memoryview]:
    start = b""
    for chunk in chunks:
        before = len(start)
        start += bytes(chunk)
        try:
            header = NpyHeader(start)
        except EOFError:
            continue
        return header, memoryview(chunk)[len(header.content) - before :]
    raise ValueError("It is cut short in the header.")
