"""Which reader belongs to which file, chosen by suffix; any other format is one reader function.

A reader is a function of a stream and the number of the first sample that is wanted; it yields the samples from there
on. Malformed data is a ``ValueError``, which is reported with the slice's name. Where several processes read a slice,
each asks for its own samples only, so the sooner a reader comes to ``first``, the better:

    def read_records(stream: SliceStream, first: int) -> Iterator[bytes]:
        stream.read(first * 512)
        while record := stream.read(512):
            yield record
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from lightning_bytescheduler.data.compression import COMPRESSIONS, decompressed
from lightning_bytescheduler.data.line_readers import count_json_lines, count_text_lines, json_blocks, text_blocks
from lightning_bytescheduler.data.npy_reader import npy_blocks
from lightning_bytescheduler.data.parquet_reader import parquet_blocks
from lightning_bytescheduler.data.sample_blocks import SampleBlock, SliceBlocks, samples_of
from lightning_bytescheduler.data.stream import SliceStream
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["FORMATS", "SliceFormat", "SliceReader", "format_of"]

SliceReader = Callable[[SliceStream, int], Iterator[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceFormat:
    """How the bytes of a slice become samples.

    Attributes:
        suffix: Of the files, without that of a compression.
        blocks: The reader, of a format that is known.
        read: The reader, of any other.
        count_lines: Counts the samples in whole lines, for a format that may be cut at any line's end; else None.
        compression: ``".gz"``, ``".zst"`` or None.
    """

    suffix: str
    blocks: SliceBlocks | None = None
    read: SliceReader | None = None
    count_lines: Callable[[bytes], int] | None = None
    compression: str | None = None

    def samples(self, stream: SliceStream, first: int = 0) -> Iterator[Any]:
        """The samples from number ``first`` on.

        Raises:
            ValueError: If the data is malformed.
            ImportError: If a library is missing that the format needs.
        """
        if self.read is not None:
            return self.read(self.opened(stream), first)
        return samples_of(self.blocks_of(stream), first)

    def blocks_of(self, stream: SliceStream) -> Iterator[SampleBlock[Any]]:
        """The samples in blocks, of a format that has them."""
        return iter(()) if self.blocks is None else self.blocks(self.opened(stream))

    def opened(self, stream: SliceStream) -> SliceStream:
        """The stream, decompressed if it is compressed."""
        return stream if self.compression is None else decompressed(stream, self.compression)


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


def format_of(url: str, reader: SliceReader | None = None) -> SliceFormat:
    """The format of a file.

    Args:
        url: Of the file; what follows its suffixes as a query does not count.
        reader: Used in place of the one that belongs to the suffix.

    Raises:
        OptionError: If the suffix is not known and no reader is given.
    """
    name = PurePosixPath(url.split("::")[0].split("?")[0]).name.lower()
    suffixes = PurePosixPath(name).suffixes
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else None
    suffix = suffixes[-1] if suffixes else ""
    if reader is not None:
        return SliceFormat(suffix=suffix, read=reader, compression=compression)
    known = FORMATS.get(suffix)
    if known is None:
        raise OptionError(
            "url",
            url,
            f"a file in {', '.join(FORMATS)} (also with {' or '.join(COMPRESSIONS)}), "
            "unless a reader for its format is given",
        )
    return replace(known, compression=compression)
