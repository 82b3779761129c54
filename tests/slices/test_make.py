from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.slices.formats import format_of
from lightning_bytescheduler.slices.make import cut_lines, row_ranges


@given(
    lines=st.lists(st.integers(0, 30), max_size=30),
    last=st.booleans(),
    target=st.integers(1, 50),
    piece=st.integers(1, 40),
)
def test_slices_are_the_text_cut_at_line_ends(lines, last, target, piece):
    text = b"".join(b"x" * length + b"\n" for length in lines) + (b"end" if last else b"")
    cut = list(
        cut_lines("a.txt", format_of("a.txt"), (text[at : at + piece] for at in range(0, len(text), piece)), target)
    )
    slices = [part for part, _ in cut]
    assert sum(samples for _, samples in cut) == len(lines) + last
    assert b"".join(slices) == text
    assert all(part.endswith(b"\n") for part in slices[:-1])
    # No larger than the target unless it is a single line.
    assert all(len(part) <= target or part.count(b"\n", 0, -1) == 0 for part in slices)


@given(rows=st.integers(0, 500), row_bytes=st.integers(1, 100), target=st.integers(1, 2000))
def test_ranges_of_rows_are_alike(rows, row_bytes, target):
    ranges = list(row_ranges(rows, row_bytes, target))
    assert [row for first, after in ranges for row in range(first, after)] == list(range(rows))
    sizes = {after - first for first, after in ranges}
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all((after - first - 1) * row_bytes <= target for first, after in ranges)
