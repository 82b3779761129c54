"""What ``make test-gpu`` says, and how it counts; on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.autograd import DeviceType

from tests.cuda import __main__ as command
from tests.cuda.exposed import covered, split


def test_without_a_gpu_it_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(torch.cuda, "is_available", lambda: False):
        assert command.main() == 0
    assert "There is no CUDA device here" in capsys.readouterr().out


@pytest.mark.parametrize("outcome", [True, False])
def test_one_summary_of_all_parts(capsys: pytest.CaptureFixture[str], outcome: bool) -> None:
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_name", lambda _: "a GPU"),
        patch.object(command, "_run", lambda arguments: ("3 passed", outcome or "nccl" in arguments)),
        patch.object(command, "EXPOSED", ()),
    ):
        assert command.main() == (not outcome)
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("a GPU")
    assert len(lines) == len(command.SECTIONS) + 2
    assert ("BAD" in lines[1]) == (not outcome)


@pytest.mark.slow
def test_tests_are_run_and_their_report_is_read() -> None:
    words, good = command._run(("tests/cuda/test_summary.py", "-k", "overlap_once", "-p", "no:cacheprovider"))
    assert (words, good) == ("1 passed, 0 failures, 0 errors, 0 skipped", True)


@pytest.mark.parametrize(("tests", "failures", "fine"), [(3, 0, True), (3, 1, False), (0, 0, False)])
def test_failures_and_no_tests_at_all_are_not_good(tests: int, failures: int, fine: bool) -> None:
    def reported(arguments: list[str], **_: Any) -> None:
        (path,) = (word.partition("=")[2] for word in arguments if word.startswith("--junitxml="))
        Path(path).write_text(f'<testsuites><testsuite tests="{tests}" failures="{failures}"/></testsuites>')

    with patch.object(command.subprocess, "run", reported):
        words, good = command._run(())
    assert words.startswith(f"{tests - failures} passed, {failures} failures")
    assert good == fine


def test_intervals_that_overlap_once() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (5.0, 6.0)]) == 4.0
    assert covered([]) == 0.0


def test_kernels_are_told_from_communication() -> None:
    def event(name: str, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=1.0, end=2.0))

    computes, carries = split(
        [event("ncclDevKernel_AllReduce"), event("Memcpy DtoH"), event("gemm"), event("gemm", DeviceType.CPU)]
    )
    assert len(computes) == 1
    assert len(carries) == 2
