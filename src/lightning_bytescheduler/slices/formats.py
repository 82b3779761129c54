"""Samples of a slice's bytes: the suffix of the file selects the format, and ``SliceSamples`` takes them by number.

Any other format needs one function of a stream and the number of the first sample, which yields the samples from there
on. Malformed data is a ``ValueError``, which is reported with the slice's name. If several processes read a slice, each
asks only for its own samples, so a reader should reach ``first`` quickly:

    def read_records(stream: SliceStream, first: int) -> Iterator[bytes]:
        stream.read(first * 512)
        while record := stream.read(512):
            yield record

The readers here find samples in blocks without making them, so that several processes share the work on one slice.
Lines may be of any length. A Parquet file describes its columns at its end, so its reader needs the whole slice before
the first sample. Compressed data (.gz, and .zst with the extra "data") is decompressed while it is read.
"""

from __future__ import annotations

import bisect
import io
import itertools
import json
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.exceptions import BadSampleError, OptionError, SliceCorruptError
from lightning_bytescheduler.slices.slice import Bytes, Slice, SliceStream

SampleNumbers = slice | npt.NDArray[np.int64]
"""Samples of a block: neighbours, or any in any order."""

SliceReader = Callable[[SliceStream, int], Iterator[Any]]
_Sample = TypeVar("_Sample", covariant=True)

COMPRESSIONS = (".gz", ".zst")
"""Suffixes of compressed files."""

_DEFLATED_BYTES = 64 * 1024  # at a time, as they may become a thousand times as many
_GZIP = 16 + zlib.MAX_WBITS  # says to zlib that there are headers of gzip
_PARSES = 5  # of a header
_TRIED = 100  # of the first samples of a file
_SPACE = 32  # the last white space character of ASCII

_decode_json = json.JSONDecoder().decode


class SampleBlock(Protocol[_Sample]):
    """Neighbouring samples of a slice. An array of rows is one."""

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
        count_lines: Counts the samples in whole lines, for a format that may be cut at line ends; otherwise ``None``.
        compression: ``".gz"``, ``".zst"`` or ``None``.
    """

    suffix: str
    blocks: SliceBlocks | None = None
    read: SliceReader | None = None
    count_lines: Callable[[bytes], int] | None = None
    compression: str | None = None

    def blocks_of(self, stream: SliceStream, first: int = 0) -> Iterator[SampleBlock[Any]]:
        """Return all samples in blocks; those of a user's reader one by one, from number ``first`` on.

        Raises:
            TypeError: If a user's reader does not return an iterable.
        """
        if self.blocks is not None:
            return self.blocks(self.opened(stream))
        made: object = None if self.read is None else self.read(self.opened(stream), first)
        if not isinstance(made, Iterable):
            raise TypeError(f"reader={self.read!r} has to yield samples, and returned {made!r}.")
        return (ListedSamples([sample]) for sample in made)

    def opened(self, stream: SliceStream) -> SliceStream:
        """Return the stream, decompressed while it is read."""
        return stream if self.compression is None else SliceStream(_inflated(stream, self.compression))


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
    suffixes = PurePosixPath(name).suffixes
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else None
    suffix = suffixes[-1] if suffixes else ""
    if compression == ".zst":
        import_zstandard()
    if reader is not None:
        return SliceFormat(suffix=suffix, read=reader, compression=compression)
    known = FORMATS.get(suffix)
    if known is None:
        raise OptionError(
            option,
            url,
            f"a file in {', '.join(FORMATS)} (also with {' or '.join(COMPRESSIONS)}), unless a reader for its format "
            "is given; of a folder with other files too, a glob chooses, such as folder/*.jsonl",
        )
    if known.blocks is parquet_blocks:
        import_parquet()
    return replace(known, compression=compression)


class ListedSamples:
    """A block of samples that are already made."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, numbers: SampleNumbers) -> list[Any]:
        if isinstance(numbers, slice):
            return self._samples[numbers]
        return [self._samples[number] for number in numbers.tolist()]


def text_blocks(stream: SliceStream) -> Iterator[TextLines]:
    r"""A line is a sample: UTF-8 without its line end, which is "\n" or "\r\n"."""
    return (TextLines(*lines) for lines in _lines(stream))


def json_blocks(stream: SliceStream) -> Iterator[JsonLines]:
    """A line is a sample, any JSON value; blank lines are skipped."""
    return (JsonLines(*lines) for lines in _lines(stream))


def count_text_lines(content: bytes) -> int:
    """Count the samples that ``text_blocks`` finds in whole lines."""
    return content.count(b"\n") + (not content.endswith(b"\n") if content else 0)


def count_json_lines(content: bytes) -> int:
    """Count the samples that ``json_blocks`` finds in whole lines."""
    return sum(1 for line in content.split(b"\n") if line and not line.isspace())


class TextLines:
    """A block of lines of text."""

    def __init__(self, content: Bytes, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        self._content = memoryview(content)
        self._starts, self._ends = starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, numbers: SampleNumbers) -> list[str]:
        if isinstance(numbers, slice):
            first, stop, _ = numbers.indices(len(self))
            if first >= stop:
                return []
            lines = str(self._content[self._starts[first] : self._ends[stop - 1]], "utf-8").split("\n")
        else:
            lines = _each(self._content, self._starts[numbers], self._ends[numbers], lambda line: str(line, "utf-8"))
        return [line.removesuffix("\r") for line in lines]


class JsonLines(TextLines):
    """A block of lines of JSON; the arguments are those of ``TextLines``."""

    def __init__(self, content: Bytes, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        if blank := _blank_lines(memoryview(content), starts, ends):
            starts, ends = np.delete(starts, blank), np.delete(ends, blank)
        super().__init__(content, starts, ends)

    def __getitem__(self, numbers: SampleNumbers) -> list[Any]:
        return _each(self._content, self._starts[numbers], self._ends[numbers], _as_json)


def _as_json(line: memoryview) -> Any:
    try:
        return _decode_json(str(line, "utf-8"))
    except ValueError:
        return json.loads(bytes(line))  # a byte order mark or surrogates; or it raises the proper error


def _each(
    content: memoryview, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], make: Callable[[memoryview], Any]
) -> list[Any]:
    return [make(content[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _blank_lines(content: memoryview, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[int]:
    firsts = np.frombuffer(content, np.uint8)[np.minimum(starts, len(content) - 1)]
    # few, as a value seldom begins with a blank
    suspects = np.flatnonzero((firsts <= _SPACE) | (starts == ends)).tolist()
    return [number for number in suspects if not bytes(content[starts[number] : ends[number]]).strip()]


def _lines(stream: SliceStream) -> Iterator[tuple[Bytes, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield whole lines with their begins and ends; only the very last one may lack its newline."""
    parts: list[bytes] = []  # of a divided line, joined once so that it is not copied for each chunk
    for chunk in stream.chunks():
        view = memoryview(chunk)
        found = np.flatnonzero(np.frombuffer(view, np.uint8) == ord("\n"))
        if not len(found):
            parts.append(bytes(view))
            continue
        begin = 0
        if parts:
            begin = int(found[0]) + 1
            line = b"".join((*parts, view[:begin]))
            yield line, np.zeros(1, np.int64), np.array([len(line) - 1])
            found = found[1:]
        end = int(found[-1]) + 1 if len(found) else begin
        parts = [bytes(view[end:])] if end < len(view) else []
        if len(found):
            ends = found - begin
            starts = np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1))
            yield view[begin:end], starts, ends
    if parts:
        line = b"".join(parts)
        yield line, np.zeros(1, np.int64), np.array([len(line)])


class NpyHeader:
    """The header of a .npy file.

    Args:
        file: The file at its begin; behind the header afterwards.

    Raises:
        ValueError: If it is not a .npy file with contiguous rows, or has Python objects.
    """

    def __init__(self, file: BinaryIO) -> None:
        start = file.read(np.lib.format.MAGIC_LEN)
        version = np.lib.format.read_magic(io.BytesIO(start))
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
                # NumPy parses with `ast`, whose depth CPython up to 3.11 counts for all threads together: another
                # one, or a finalizer, has parsed in the middle of it.
                if not again:
                    raise
        if not shape:
            raise ValueError("The array has no dimension and hence no rows.")
        if fortran_order and len(shape) > 1:
            raise ValueError("The array is in Fortran order, where rows do not lie together; save it in C order.")
        if dtype.hasobject:
            raise ValueError("The array holds Python objects, which are not read, as that could run any code.")
        self.dtype = dtype
        self.content = start + text
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
    """A row is a sample: an array that shares the memory of its chunk, which for local data is the mapped file.

    A block has the rows of one chunk.
    """
    header = NpyHeader(cast(BinaryIO, stream))
    row = bytearray()  # a row that is divided between chunks
    for chunk in stream.chunks():
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


def require_sample(form: SliceFormat, url: str, blocks: Iterable[SampleBlock[Any]]) -> None:
    """Require that one of the first samples can be made, as lines are counted and cut without being parsed.

    Raises:
        BadSampleError: If the file is in another format than its name says, or in another encoding.
    """
    block = next((block for block in blocks if len(block)), ListedSamples([]))
    first: ValueError | None = None
    for number in range(min(len(block), _TRIED)):
        try:
            block[number : number + 1]
        except ValueError as error:
            first = first or error
        else:
            return
    if first is not None:
        hint = "Is it in another format than its name says, or not UTF-8?"
        raise BadSampleError(f"No sample of {form.suffix} can be made of {url}: {first}. {hint}") from first


def import_parquet() -> Any:
    """Import ``pyarrow.parquet``.

    Raises:
        ImportError: If pyarrow is not installed.
    """
    with importing("Parquet"):
        from pyarrow import parquet
    return parquet


def import_zstandard() -> ModuleType:
    """Import ``zstandard``.

    Raises:
        ImportError: If it is not installed.
    """
    with importing(".zst", extra="data"):
        import zstandard
    return zstandard


def _inflated(stream: SliceStream, compression: str) -> Iterator[bytearray]:
    """Yield the bytes of compressed members, one after the other, as they are decompressed.

    The libraries' own files take one that is cut short for complete, or seek.
    """
    if compression == ".gz":
        failure, begin = zlib.error, partial(zlib.decompressobj, wbits=_GZIP)
    else:
        zstandard = import_zstandard()
        failure, begin = zstandard.ZstdError, zstandard.ZstdDecompressor().decompressobj
    member = None
    try:
        for chunk in stream.chunks():
            for start in range(0, len(chunk), _DEFLATED_BYTES):
                content = bytes(chunk[start : start + _DEFLATED_BYTES])
                while content := content if member else content.lstrip(b"\0"):  # members may be padded
                    member = member or begin()
                    if piece := member.decompress(content):
                        yield bytearray(piece)
                    content, member = (member.unused_data, None) if member.eof else (b"", member)
    except failure as error:
        raise ValueError(f"It cannot be decompressed: {error}") from error
    if member is not None:
        raise ValueError("It cannot be decompressed: it is cut short.")


FORMATS = {
    form.suffix: form
    for form in (
        SliceFormat(suffix=".txt", blocks=text_blocks, count_lines=count_text_lines),
        SliceFormat(suffix=".jsonl", blocks=json_blocks, count_lines=count_json_lines),
        SliceFormat(suffix=".npy", blocks=npy_blocks),
        SliceFormat(suffix=".parquet", blocks=parquet_blocks),
    )
}
"""The formats that are known by their suffix."""


LeaveOut = Callable[[int, Exception], None]
"""Called with the number of a sample that cannot be decoded, and why. The sample is left out, unless it raises."""


class SliceSamples:
    """Samples of a slice by number: a process makes those of its own batches and skips the others.

    They come in parts with ``take``, or in any order with ``pick``, which keeps the whole slice.

    Both raise a ``SliceCorruptError`` if the slice is not as expected, or a sample cannot be decoded and there is no
    ``leave_out``; samples yielded before are correct.

    A known format finds samples without making them. A user's reader makes one after the other. To skip samples it
    begins anew, if all bytes are local, or makes samples in vain.

    Args:
        begin: Begins to read its verified bytes.
        header: What comes before the bytes of a slice that does not begin with its file.
        is_here: Whether all bytes are on this machine, so that reading them again is cheap.
    """

    def __init__(
        self,
        slice_: Slice,
        form: SliceFormat,
        begin: Callable[[], Iterator[Bytes]],
        *,
        header: bytes = b"",
        is_here: Callable[[], bool] = lambda: False,
    ) -> None:
        self._slice = slice_
        self._form = form
        self._begin_bytes = begin
        self._header = header if slice_.start else b""
        self._is_here = is_here
        self._bytes: Iterator[Bytes] = iter(())
        self._blocks: Iterator[SampleBlock[Any]] | None = None
        self._block: SampleBlock[Any] = ListedSamples([])
        self._begin = self._first = 0  # first samples of the block, and of the reading
        self._all: list[tuple[int, SampleBlock[Any]]] = []  # with the number of the first sample of each

    def take(self, start: int, stop: int, leave_out: LeaveOut | None = None) -> Iterator[Sequence[Any]]:
        """Yield samples ``start`` to ``stop``; earlier ones cannot be requested afterwards."""
        if self._form.blocks is None and (self._blocks is None or (start != self._end and self._is_here())):
            self._blocks, self._block = None, ListedSamples([])
            self._begin = self._first = start
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
                self.close()
                self._bytes = self._begin_bytes()
                stream = SliceStream(itertools.chain((self._header,) if self._header else (), self._bytes))
                self._blocks = self._form.blocks_of(stream, self._first)
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
        reason = f"it holds {what} were counted."
        if more and self._first:
            reason += f" Or the reader did not begin with sample number {self._first}, its argument first."
        return SliceCorruptError(self._slice.key, self._slice.url, reason)

    def _corrupt(self, number: int, error: Exception) -> SliceCorruptError:
        reason = str(error) or type(error).__name__
        return SliceCorruptError(self._slice.key, self._slice.url, f"after sample {number}: {reason}")
