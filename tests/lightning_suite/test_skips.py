from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning_suite import skips as module
from tests.lightning_suite.skips import Skip, SkipFileError, read_skips, skip_of, stale_skips


def test_a_pattern_names_a_test_from_tests_pytorch_on() -> None:
    skip = Skip("strategies/test_ddp.py::test_it[a-*]", "because")

    assert skip.matches("tests_pytorch/strategies/test_ddp.py::test_it[a-1]")
    assert not skip.matches("tests_pytorch/strategies/test_ddp.py::test_it[b-1]")
    assert not skip.matches("tests_pytorch/strategies/test_ddp.py::test_ita")
    assert not skip.matches("tests_pytorch/more/strategies/test_ddp.py::test_it[a-1]")


def test_the_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "skips.txt"
    path.write_text("# pattern | reason\n\na.py::* | one | two\n  b.py::test   |   three\n")

    assert read_skips(path) == [Skip("a.py::*", "one | two"), Skip("b.py::test", "three")]
    assert skip_of("tests_pytorch/a.py::x", read_skips(path)) == Skip("a.py::*", "one | two")
    assert skip_of("tests_pytorch/c.py::x", read_skips(path)) is None


@pytest.mark.parametrize("line", ["a.py::test", "a.py::test | ", " | reason"])
def test_a_skip_without_pattern_or_reason_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "skips.txt"
    path.write_text(f"# first\n{line}\n")

    with pytest.raises(SkipFileError, match=r"skips.txt, line 2"):
        read_skips(path)


def test_skips_without_a_test_are_stale() -> None:
    used, unused = Skip("a.py::*", "one"), Skip("b.py::*", "two")

    assert stale_skips([used, unused], ["tests_pytorch/a.py::x"]) == [unused]


def test_the_committed_file_can_be_read_and_names_no_test_twice() -> None:
    patterns = [skip.pattern for skip in read_skips(Path(module.__file__).with_name("skips.txt"))]

    assert patterns
    assert len(set(patterns)) == len(patterns)
