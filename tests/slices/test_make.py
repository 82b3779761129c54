from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.slices.make import cut_lines


@given(
    lines=st.lists(st.integers(0, 30), max_size=30),
    last=st.booleans(),
    target=st.integers(1, 50),
    piece=st.integers(1, 40),
)
def test_slices_are_the_text_cut_at_line_ends(lines, last, target, piece):
    text = b"".join(b"x" * length + b"\n" for length in lines) + (b"end" if last else b"")
    slices = list(cut_lines((text[at : at + piece] for at in range(0, len(text), piece)), target))
    assert b"".join(slices) == text
    assert all(part.endswith(b"\n") for part in slices[:-1])
    # No larger than the target unless it is a single line.
    assert all(len(part) <= target or part.count(b"\n", 0, -1) == 0 for part in slices)
