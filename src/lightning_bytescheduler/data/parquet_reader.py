"""The reader of Parquet files, and the example of a reader for a format that cannot be read from its start.

A Parquet file says at its end where its columns are, so this reader takes the whole slice before the first sample.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from lightning_bytescheduler.data.stream import SliceStream

__all__ = ["read_parquet"]


def read_parquet(stream: SliceStream, first: int) -> Iterator[dict[str, Any]]:
    """A row is a sample: a dictionary of its columns.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If it is no Parquet file.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("Parquet is read with pyarrow, which is not installed: pip install pyarrow") from error
    file = parquet.ParquetFile(io.BytesIO(stream.read()))
    for batch in file.iter_batches():
        if first >= batch.num_rows:
            first -= batch.num_rows
            continue
        yield from batch.slice(first).to_pylist()
        first = 0
