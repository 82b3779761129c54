"""Samples of a slice's bytes: the suffix of the file selects the format, and ``SliceSamples`` takes them by number.

Any other format needs one function of a stream, which yields the samples. Malformed data is a ``ValueError``, which is
reported with the slice's name:

    def read_records(stream: SliceStream) -> Iterator[bytes]:
        while record := stream.read(512):
            yield record

If several processes read a slice, each reads it from its begin and skips what is not its own. The readers here find
samples in blocks without making them, so that the processes share the work; one of a user should leave decoding to
``transform``. Lines may be of any length. A Parquet file describes its columns at its end, so its reader needs the
whole slice before the first sample. A .gz file is decompressed while it is read.
"""

from __future__ import annotations

import bisect
import gzip
import io
import json
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError
from lightning_bytescheduler.slices.slice import Bytes, Slice, SliceStream

SampleNumbers = slice | npt.NDArray[np.int64]
"""Samples of a block: neighbours, or any in any order."""

SliceReader = Callable[[SliceStream], Iterator[Any]]
_Sample = TypeVar("_Sample", covariant=True)

_INFLATED_BYTES = 1024 * 1024  # at a time
_PARSES = 5  # of a header


class SampleBlock(Protocol[_Sample]):
    """Neighbouring samples of a slice. An array of rows is such a block."""

    def __len__(self) -> int:
        """Return their number, without making any."""

    def __getitem__(self, numbers: SampleNumbers, /) -> Sequence[_Sample]:
        """Make only these samples.

        Raises:
            ValueError: If one is malformed.
        """


SliceBlocks = Callable[[SliceStream], Iterator[SampleBlock[Any]]]
"""A reader that finds samples without making them: yields blocks of a slice as its bytes arrive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceFormat:
    """How the bytes of a slice become samples.

    Attributes:
        is_gzip: Whether they are compressed.
    """

    suffix: str
    blocks: SliceBlocks
    is_gzip: bool = False

    def blocks_of(self, stream: SliceStream) -> Iterator[SampleBlock[Any]]:
        """Return all samples in blocks.

        Raises:
            TypeError: If a user's reader does not return an iterable.
        """
        return self.blocks(self.opened(stream))

    def opened(self, stream: SliceStream) -> SliceStream:
        """Return the stream, decompressed while it is read."""
        return SliceStream(_inflated(stream)) if self.is_gzip else stream


def format_of(url: str, reader: SliceReader | None = None, *, option: str = "url") -> SliceFormat:
    """Return the format of a file.

    Args:
        url: URL of the file; a query after its suffixes is ignored.
        reader: Replaces the reader of the suffix.
        option: Option with the file, for messages.

    Raises:
        OptionError: If the suffix is not known and no reader is given.
        ImportError: If a package is missing that the format needs; names it and the extra.
    """
    name = PurePosixPath(url.split("::")[0].split("?")[0]).name.lower()
    is_gzip = name.endswith(".gz")
    suffix = PurePosixPath(name.removesuffix(".gz")).suffix
    if reader is not None:
        return SliceFormat(suffix=suffix, blocks=partial(_blocks_of_reader, reader), is_gzip=is_gzip)
    known = FORMATS.get(suffix)
    if known is None:
        raise OptionError(
            option,
            url,
            f"a file in {', '.join(FORMATS)} (also with .gz), unless a reader for its format is given; of a folder "
            "with other files too, a glob chooses, such as folder/*.jsonl",
        )
    if known.blocks is parquet_blocks:
        import_parquet()
    return replace(known, is_gzip=is_gzip)


def _blocks_of_reader(reader: SliceReader, stream: SliceStream) -> Iterator[ListedSamples]:
    made: object = reader(stream)
    if not isinstance(made, Iterable):
        raise TypeError(f"reader={reader!r} has to yield samples, and returned {made!r}.")
    return (ListedSamples([sample]) for sample in made)


class ListedSamples:
    """A block of samples, each of which is made when it is asked for.

    Args:
        raw: What they are made of.
        make: Makes one; ``None`` where they are made already.
    """

    def __init__(self, raw: list[Any], make: Callable[[Any], Any] | None = None) -> None:
        self._raw = raw
        self._make = make

    def __len__(self) -> int:
        return len(self._raw)

    def __getitem__(self, numbers: SampleNumbers) -> list[Any]:
        found = self._raw[numbers] if isinstance(numbers, slice) else [self._raw[n] for n in numbers.tolist()]
        return found if self._make is None else list(map(self._make, found))


def text_blocks(stream: SliceStream) -> Iterator[ListedSamples]:
    r"""A line is a sample: UTF-8 without its line end, which is "\n" or "\r\n"."""
    return (ListedSamples(lines, _as_text) for lines in _lines(stream))


def json_blocks(stream: SliceStream) -> Iterator[ListedSamples]:
    """A line is a sample, any JSON value; blank lines are skipped."""
    return (ListedSamples(list(filter(_is_json, lines)), json.loads) for lines in _lines(stream))


def _as_text(line: bytes) -> str:
    return str(line, "utf-8").removesuffix("\r")


def _is_json(line: bytes) -> bool:
    return bool(line) and not line.isspace()


def _lines(stream: SliceStream) -> Iterator[list[bytes]]:
    """Yield the lines that end in a piece, without their ends; only the very last one may lack its newline."""
    parts: list[bytes] = []  # of a divided line, joined once so that it is not copied for each piece
    for piece in stream.chunks():
        first, *others = bytes(piece).split(b"\n")
        parts.append(first)
        if others:
            yield [b"".join(parts), *others[:-1]]
            parts = others[-1:]
    if last := b"".join(parts):
        yield [last]


class NpyHeader:
    """The header of a .npy file.

    Args:
        file: The file, at its beginning; afterwards it is behind the header.

    Raises:
        ValueError: If it is not a .npy file with contiguous rows, or has Python objects.
    """

    def __init__(self, file: BinaryIO) -> None:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"Version {version} of .npy is not read; save the array again, without named fields.")
        size = file.read(2 if version == (1, 0) else 4)
        text = size + file.read(int.from_bytes(size, "little"))
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        for again in range(_PARSES)[::-1]:
            try:
                shape, fortran_order, dtype = read(io.BytesIO(text))
                break
            except SystemError:
                # NumPy parses with `ast`, whose depth CPython up to 3.11 counts for all threads together. Another
                # thread, or a finalizer, has parsed at the same time.
                if not again:
                    raise
        if not shape:
            raise ValueError("The array has no dimension and hence no rows.")
        if fortran_order and len(shape) > 1:
            raise ValueError("The array is in Fortran order, where rows do not lie together; save it in C order.")
        if dtype.hasobject:
            raise ValueError("The array holds Python objects, which are not read, as that could run any code.")
        self.dtype = dtype
        self.rows: int = shape[0]
        self.row_shape: tuple[int, ...] = shape[1:]
        self.row_bytes = int(np.prod(self.row_shape, dtype=np.int64)) * dtype.itemsize
        if not self.row_bytes:
            raise ValueError(f"Rows of shape {self.row_shape} are empty.")

    def rows_of(self, content: Bytes) -> np.ndarray[Any, Any]:
        """Return the rows in ``content``, as an array that shares its memory."""
        rows = len(content) // self.row_bytes
        return np.frombuffer(content, self.dtype).reshape((rows, *self.row_shape))


def npy_blocks(stream: SliceStream) -> Iterator[Any]:
    """A row is a sample: an array that shares the memory of its chunk.

    A block has the rows of one chunk.
    """
    header = NpyHeader(cast(BinaryIO, stream))
    row, rows = bytearray(), 0  # a row that is divided between chunks, and the number of whole ones
    for chunk in stream.chunks():
        view = memoryview(chunk)
        if row:
            missing = header.row_bytes - len(row)
            row += view[:missing]
            view = view[missing:]
            if len(row) < header.row_bytes:
                continue
            rows += 1
            yield header.rows_of(row)
        whole = len(view) - len(view) % header.row_bytes
        if whole:
            rows += whole // header.row_bytes
            yield header.rows_of(view[:whole])
        row = bytearray(view[whole:])
    if row or rows != header.rows:
        raise ValueError(f"Its header tells of {header.rows} rows of {header.row_bytes} bytes, and there are {rows}.")


class ParquetRows:
    """A block of rows; only requested rows become Python values."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def __getitem__(self, numbers: SampleNumbers) -> list[dict[str, Any]]:
        from pyarrow import array

        rows = self._batch.take(array(np.arange(len(self))[numbers]))
        found: list[dict[str, Any]] = rows.to_pylist()
        return found


def parquet_blocks(stream: SliceStream) -> Iterator[ParquetRows]:
    """A row is a sample: a dictionary of its columns.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If it is not a Parquet file.
    """
    file = import_parquet().ParquetFile(io.BytesIO(stream.read()))
    return (ParquetRows(batch) for batch in file.iter_batches())


def import_parquet() -> Any:
    """Import ``pyarrow.parquet``.

    Raises:
        ImportError: If pyarrow is not installed.
    """
    with importing("Parquet"):
        from pyarrow import parquet
    return parquet


def _inflated(stream: SliceStream) -> Iterator[bytearray]:
    """Yield the bytes of a .gz file as they are decompressed."""
    try:
        with gzip.GzipFile(fileobj=stream) as file:
            while piece := file.read1(_INFLATED_BYTES):
                yield bytearray(piece)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"It cannot be decompressed: {error}") from error


FORMATS = {
    form.suffix: form
    for form in (
        SliceFormat(suffix=".txt", blocks=text_blocks),
        SliceFormat(suffix=".jsonl", blocks=json_blocks),
        SliceFormat(suffix=".npy", blocks=npy_blocks),
        SliceFormat(suffix=".parquet", blocks=parquet_blocks),
    )
}
"""The formats that are known by their suffix."""


LeaveOut = Callable[[int, Exception], None]
"""Called with the number of a sample that cannot be decoded, and the error. May raise; else the sample is left out."""


class SliceSamples:
    """Samples of a slice by number: a process makes those of its own batches and skips the others.

    They come in parts with ``take``, or in any order with ``pick``, which keeps the whole slice.

    Both raise a ``SliceCorruptError`` if the slice is not as expected, or a sample cannot be decoded and there is no
    ``leave_out``; samples yielded before are correct.

    A known format finds samples without making them. A user's reader makes one after the other.

    Args:
        begin: Begins to read its verified bytes.
    """

    def __init__(self, slice_: Slice, form: SliceFormat, begin: Callable[[], Iterator[Bytes]]) -> None:
        self._slice = slice_
        self._form = form
        self._begin_bytes = begin
        self._bytes: Iterator[Bytes] = iter(())
        self._blocks: Iterator[SampleBlock[Any]] | None = None
        self._block: SampleBlock[Any] = ListedSamples([])
        self._begin = 0  # number of the block's first sample
        self._all: list[tuple[int, SampleBlock[Any]]] = []  # each with the number of its first sample

    def take(self, start: int, stop: int, leave_out: LeaveOut | None = None) -> Iterator[Sequence[Any]]:
        """Yield samples ``start`` to ``stop``; earlier ones cannot be requested afterwards."""
        while start < stop:
            while start >= self._end and self._go_on():
                pass
            upto = min(stop, self._end)
            if start >= upto:
                raise self._wrong_count()
            inside = slice(start - self._begin, upto - self._begin)
            yield from self._made(self._block, self._begin, inside, leave_out)
            start = upto
        if stop == self._slice.samples:
            self._require_end()

    def pick(self, numbers: npt.NDArray[np.int64], leave_out: LeaveOut | None = None) -> Iterator[Sequence[Any]]:
        """Yield samples in any order."""
        if not self._all:
            self._all = self._read_all()
        if len(self._all) == 1:
            yield from self._made(self._all[0][1], 0, numbers, leave_out)
            return
        for number in numbers.tolist():
            begin, block = self._all[bisect.bisect_right(self._all, number, key=itemgetter(0)) - 1]
            yield from self._made(block, begin, slice(number - begin, number - begin + 1), leave_out)

    def close(self) -> None:
        """End reading, which releases the slice."""
        if isinstance(self._bytes, Generator):
            self._bytes.close()

    @property
    def _end(self) -> int:
        return self._begin + len(self._block)

    def _go_on(self) -> bool:
        try:
            if self._blocks is None:
                self._bytes = self._begin_bytes()
                self._blocks = self._form.blocks_of(SliceStream(self._bytes))
            block = next(self._blocks, None)
        except (ValueError, EOFError) as error:
            raise self._corrupt(self._end, error) from error
        if block is None:
            return False
        self._begin, self._block = self._end, block
        return True

    def _require_end(self) -> None:
        while self._end <= self._slice.samples and self._go_on():  # also reads the remaining bytes
            pass
        if self._end > self._slice.samples:
            raise self._wrong_count()

    def _read_all(self) -> list[tuple[int, SampleBlock[Any]]]:
        found = []
        while self._go_on():
            if len(self._block):
                found.append((self._begin, self._block))
        if self._end != self._slice.samples:
            raise self._wrong_count()
        return found

    def _made(
        self, block: SampleBlock[Any], begin: int, numbers: SampleNumbers, leave_out: LeaveOut | None
    ) -> Iterator[Sequence[Any]]:
        """Yield samples of a block that begins at number ``begin`` of the slice; ``numbers`` count within the block."""
        try:
            made = block[numbers]
        except ValueError:  # the other samples are correct
            each = range(*numbers.indices(len(block))) if isinstance(numbers, slice) else numbers.tolist()
            for number in each:
                try:
                    one = block[number : number + 1]
                except ValueError as error:
                    if leave_out is None:
                        raise self._corrupt(begin + number, error) from error
                    leave_out(begin + number, error)
                else:
                    yield one
        else:
            yield made

    def _wrong_count(self) -> SliceCorruptError:
        more, counted = self._end > self._slice.samples, self._slice.samples
        what = f"more than the {counted} samples that" if more else f"{self._end} samples, where {counted}"
        return SliceCorruptError(self._slice.key, self._slice.url, f"it holds {what} were counted.")

    def _corrupt(self, number: int, error: Exception) -> SliceCorruptError:
        reason = str(error) or type(error).__name__
        return SliceCorruptError(self._slice.key, self._slice.url, f"after sample {number}: {reason}")
