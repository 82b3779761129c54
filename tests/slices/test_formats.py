"""Readers yield the same samples however their bytes are divided, and from any sample on."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.formats import NpyHeader, format_of
from lightning_bytescheduler.slices.make import npy_slice
from lightning_bytescheduler.slices.slice import SliceStream


def pieces(content: bytes, size: int):
    for start in range(0, len(content), size):
        yield bytearray(content[start : start + size])


def read(url: str, content: bytes, size: int, first: int = 0) -> list:
    blocks = format_of(url).blocks_of(SliceStream(pieces(content, size)))
    return [sample for block in blocks for sample in block[:]][first:]


LINES = st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=8), max_size=12)


@given(lines=LINES, end=st.sampled_from(["\n", "\r\n"]), last=st.booleans(), size=st.integers(1, 20), data=st.data())
def test_text(lines, end, last, size, data):
    content = end.join(lines).encode() + (end.encode() if last and lines else b"")
    expected = list(lines)
    if not last and expected and not expected[-1]:
        expected.pop()  # nothing stands behind the last line end
    first = data.draw(st.integers(0, len(expected)))
    assert read("a.txt", content, size, first) == expected[first:]


@given(
    values=st.lists(st.one_of(st.integers(), st.text(max_size=5), st.lists(st.booleans(), max_size=3)), max_size=10),
    size=st.integers(1, 20),
    data=st.data(),
)
def test_jsonl(values, size, data):
    blanks = data.draw(st.lists(st.sampled_from(["", "\n", " \n"]), min_size=len(values), max_size=len(values)))
    content = "".join(f"{blank}{json.dumps(value)}\n" for blank, value in zip(blanks, values, strict=True)).encode()
    first = data.draw(st.integers(0, len(values)))
    assert read("a.jsonl", content, size, first) == values[first:]


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 5)])
@pytest.mark.parametrize("size", [1, 13, 64, 128, 130, 4096])
@pytest.mark.parametrize("first", [0, 3, 7])
def test_npy(shape, size, first):
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = read("a.npy", npy_slice(rows), size, first)
    assert len(found) == 7 - first
    for row, expected in zip(found, rows[first:], strict=True):
        np.testing.assert_array_equal(row, expected)


def test_rows_of_a_piece_share_its_memory():
    content = bytearray(npy_slice(np.zeros((4, 8), np.float32)))
    rows: Any
    (rows,) = format_of("a.npy").blocks_of(SliceStream(iter([content])))
    rows[2][3] = 5
    assert np.load(io.BytesIO(content))[2, 3] == 5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no array",
        npy_slice(np.zeros((3, 2)))[:-1],
        npy_slice(np.zeros((3, 2)))[:50],
        npy_slice(np.zeros((3, 0))),
    ],
)
def test_a_damaged_array_is_an_error(content):
    with pytest.raises(ValueError, match=r"\w"):
        read("a.npy", content, 40)


def test_an_array_of_objects_is_refused_and_not_run():
    file = io.BytesIO()
    np.save(file, np.array([{}, []], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        read("a.npy", file.getvalue(), 4096)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_compressed_members_one_after_the_other(size):
    content = gzip.compress(b"one\ntw") + gzip.compress(b"o\nthree\n")
    assert read("a.txt.gz", content, size) == ["one", "two", "three"]
    assert read("a.txt.gz", content + bytes(5), size) == ["one", "two", "three"]  # padded
    damaged = content[:12] + bytes([content[12] ^ 255]) + content[13:]
    for wrong in (content[:-3], b"plain text", content + b"more", damaged):
        with pytest.raises(ValueError, match="decompressed"):
            read("a.txt.gz", wrong, size)


def test_the_suffix_is_that_of_the_file_and_not_of_a_query_or_a_container():
    assert format_of("http://host/a.JSONL?version=1.2").suffix == ".jsonl"
    assert format_of("zip://a.npy::/tmp/b.zip").suffix == ".npy"
    with pytest.raises(OptionError, match="a reader for its format"):
        format_of("/tmp/a.tfrecord")


def test_any_other_format_is_one_function():
    def read_pairs(stream):
        while pair := stream.read(2):
            yield pair

    form = format_of("a.bin", read_pairs)
    blocks = form.blocks_of(SliceStream(pieces(b"aabbccdd", 3)))
    assert [sample for block in blocks for sample in block[:]] == [b"aa", b"bb", b"cc", b"dd"]


def test_parquet():
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": [1, 2, 3]}), file)
    assert read("a.parquet", file.getvalue(), 100, 1) == [{"a": 2}, {"a": 3}]


def test_a_header_is_parsed_again_where_other_parsing_came_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython up to 3.11 fails, now and then, where two threads parse Python at once, or a finalizer does."""
    parse = np.lib.format.read_array_header_1_0
    failures = 4

    def fails(file: Any) -> Any:
        nonlocal failures
        found = parse(file)
        failures -= 1
        if failures >= 0:
            raise SystemError("AST constructor recursion depth mismatch (before=210, after=231)")
        return found

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", fails)
    content = io.BytesIO()
    np.save(content, np.zeros((7, 3)))
    content.seek(0)
    header = NpyHeader(content)
    assert (header.rows, header.row_shape, content.tell()) == (7, (3,), 128)
    failures = 5
    with pytest.raises(SystemError, match="depth mismatch"):
        NpyHeader(io.BytesIO(content.getvalue()))
