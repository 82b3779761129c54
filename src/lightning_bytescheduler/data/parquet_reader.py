"""The reader of Parquet files, a format that cannot be read from its start.

A Parquet file says at its end where its columns are, so this reader takes the whole slice before the first sample.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from lightning_bytescheduler.data.sample_blocks import SampleNumbers
from lightning_bytescheduler.data.stream import SliceStream

__all__ = ["ParquetRows", "cut_parquet", "parquet_blocks"]


class ParquetRows:
    """A block of rows; only those that are asked for become Python's values.

    Args:
        batch: A ``pyarrow.RecordBatch``.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def __getitem__(self, numbers: SampleNumbers) -> list[dict[str, Any]]:
        if isinstance(numbers, slice):
            first, stop, _ = numbers.indices(len(self))
            rows = self._batch.slice(first, max(stop - first, 0))
        else:
            rows = self._batch.take(_arrow().array(numbers))
        found: list[dict[str, Any]] = rows.to_pylist()
        return found


def parquet_blocks(stream: SliceStream) -> Iterator[ParquetRows]:
    """A row is a sample: a dictionary of its columns.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If it is no Parquet file.
    """
    file = _parquet().ParquetFile(io.BytesIO(stream.read()))
    return (ParquetRows(batch) for batch in file.iter_batches())


def cut_parquet(file: BinaryIO, slice_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Cut a Parquet file into smaller ones of about ``slice_bytes``, by the rows' average size.

    Yields:
        The content of a file, and its rows.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If it is no Parquet file.
    """
    parquet = _parquet()
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    source = parquet.ParquetFile(file)
    total = source.metadata.num_rows
    rows = max(slice_bytes * total // max(size, 1), 1)
    table = source.read()
    for first in range(0, total, rows):
        part = table.slice(first, rows)
        content = io.BytesIO()
        parquet.write_table(part, content)
        yield content.getvalue(), part.num_rows


def _arrow() -> Any:
    import pyarrow

    return pyarrow


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("Parquet is read with pyarrow, which is not installed: pip install pyarrow") from error
    return parquet
