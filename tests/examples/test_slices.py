from __future__ import annotations

import re

import pytest

from examples import slices

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def test_it_trains_over_http_and_resumes_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    assert slices.main(["--size", "20000", "--steps", "10", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    found = re.search(r"slices of (\d+) lines at http://127", printed)
    assert found is not None
    lines = int(found[1])
    assert lines > 10 * 32
    assert f"{10 * 32} + {lines - 10 * 32} = {lines} lines: the epoch, each line once" in printed
