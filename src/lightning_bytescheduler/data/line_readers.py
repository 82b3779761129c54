"""Readers of lines: text and JSON, without waiting for the whole slice, and without decoding what nobody asks for.

A line may be of any length; one that is divided between chunks is put together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.data.chunks import Bytes
from lightning_bytescheduler.data.sample_blocks import SampleNumbers
from lightning_bytescheduler.data.stream import SliceStream

__all__ = ["count_json_lines", "count_text_lines", "json_blocks", "text_blocks"]

_PIECE_BYTES = 1024 * 1024  # searched at once for the ends of lines: what is compared stays in the processor's cache
_NEWLINE = 10
_SPACE = 32  # the last of the white space in ASCII

_decode_json = json.JSONDecoder().decode


def text_blocks(stream: SliceStream) -> Iterator[TextLines]:
    """A line is a sample: UTF-8 without its line end, which is a newline, or a carriage return and a newline."""
    return (TextLines(*lines) for lines in _lines(stream))


def json_blocks(stream: SliceStream) -> Iterator[JsonLines]:
    """A line is a sample, any JSON value; lines of blanks do not count."""
    return (JsonLines(*lines) for lines in _lines(stream))


def count_text_lines(content: bytes) -> int:
    """The samples that ``text_blocks`` finds in whole lines."""
    return content.count(b"\n") + (not content.endswith(b"\n") if content else 0)


def count_json_lines(content: bytes) -> int:
    """The samples that ``json_blocks`` finds in whole lines."""
    return sum(1 for line in content.split(b"\n") if line and not line.isspace())


class TextLines:
    """A block of lines of text.

    Args:
        content: Whole lines.
        starts: Where each begins.
        ends: Where each ends, without its newline.
    """

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
            lines = _each(self._content, self._starts[numbers], self._ends[numbers], _as_text)
        return [line.removesuffix("\r") for line in lines]


class JsonLines:
    """A block of lines of JSON; the arguments are those of ``TextLines``."""

    def __init__(self, content: Bytes, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        self._content = memoryview(content)
        blank = _blank_lines(self._content, starts, ends)
        self._starts, self._ends = (np.delete(starts, blank), np.delete(ends, blank)) if blank else (starts, ends)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, numbers: SampleNumbers) -> list[Any]:
        return _each(self._content, self._starts[numbers], self._ends[numbers], _as_json)


def _as_text(line: memoryview) -> str:
    return str(line, "utf-8")


def _as_json(line: memoryview) -> Any:
    try:
        return _decode_json(str(line, "utf-8"))
    except ValueError:
        return json.loads(bytes(line))  # a byte order mark, or surrogates; or it says what is wrong


def _each(
    content: memoryview, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], make: Callable[[memoryview], Any]
) -> list[Any]:
    return [make(content[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _blank_lines(content: memoryview, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[int]:
    """Numbers of the lines of white space."""
    firsts = np.frombuffer(content, np.uint8)[np.minimum(starts, len(content) - 1)]
    suspects = np.flatnonzero((firsts <= _SPACE) | (starts == ends)).tolist()  # few: a value seldom follows a blank
    return [number for number in suspects if not bytes(content[starts[number] : ends[number]]).strip()]


def _lines(stream: SliceStream) -> Iterator[tuple[Bytes, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Whole lines, and where each begins and ends; only the very last one may lack its newline."""
    parts: list[bytes] = []  # of a line that is divided, joined once: it is not copied for each of its chunks
    for chunk in stream.chunks():
        view = memoryview(chunk)
        found = _newlines(view)
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


def _newlines(content: memoryview) -> npt.NDArray[np.int64]:
    found = []
    codes = np.frombuffer(content, np.uint8)
    for start in range(0, len(codes), _PIECE_BYTES):
        found.append(np.flatnonzero(codes[start : start + _PIECE_BYTES] == _NEWLINE) + start)
    return np.concatenate(found) if found else np.zeros(0, np.int64)
