"""Readers of lines: text and JSON, sample by sample, without waiting for the whole slice.

A line may be of any length; one that is divided between chunks is put together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lightning_bytescheduler.data.stream import SliceStream

__all__ = ["count_json_lines", "count_text_lines", "read_jsonl", "read_text"]


def read_text(stream: SliceStream, first: int) -> Iterator[str]:
    """A line is a sample: UTF-8 without its line end, which is a newline, or a carriage return and a newline."""
    for block in _whole_lines(stream):
        skipped = 0
        if first:
            lines = count_text_lines(block)
            if first >= lines:
                first -= lines
                continue
            skipped, first = first, 0
        text = block.decode()
        lines_of_text = text.split("\n")
        if text.endswith("\n"):
            lines_of_text.pop()
        for line in lines_of_text[skipped:] if skipped else lines_of_text:
            yield line.removesuffix("\r")


def read_jsonl(stream: SliceStream, first: int) -> Iterator[Any]:
    """A line is a sample, any JSON value; lines of blanks do not count."""
    for block in _whole_lines(stream):
        for line in block.split(b"\n"):
            if not line or line.isspace():
                continue
            if first:
                first -= 1
                continue
            yield json.loads(line)


def count_text_lines(content: bytes) -> int:
    """The samples that ``read_text`` finds in whole lines."""
    return content.count(b"\n") + (not content.endswith(b"\n") if content else 0)


def count_json_lines(content: bytes) -> int:
    """The samples that ``read_jsonl`` finds in whole lines."""
    return sum(1 for line in content.split(b"\n") if line and not line.isspace())


def _whole_lines(stream: SliceStream) -> Iterator[bytes]:
    """Blocks that end at a line's end; only the last may lack it."""
    parts: list[bytes] = []
    for chunk in stream.chunks():
        content = bytes(chunk)
        end = content.rfind(b"\n") + 1
        if not end:
            parts.append(content)  # joined once: a line of many chunks is not copied for each
            continue
        yield b"".join((*parts, content[:end])) if parts else content[:end]
        parts = [content[end:]] if end < len(content) else []
    if parts:
        yield b"".join(parts)
