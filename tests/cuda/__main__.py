"""Runs everything that needs a GPU, and prints one summary::

    make test-gpu

On a machine without one it says so, and ends well: nothing was found to be wrong.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import torch
import torch.distributed as dist

from tests.cuda.exposed import EXPOSED, profiled
from tests.support.rank_pool import RankPool

SECTIONS = (
    ("streams, two ranks on one GPU over gloo, and gates", ("tests/cuda/test_streams.py", "-k", "not nccl")),
    ("streams, one rank on NCCL", ("tests/cuda/test_streams.py", "-k", "nccl")),
    (
        "one order, by host memory, encoded, fp16, bf16, torch.compile, over gloo",
        ("tests/cuda/test_kinds.py", "-k", "not nccl"),
    ),
    ("one order, by host memory, fp16, bf16, torch.compile, on NCCL", ("tests/cuda/test_kinds.py", "-k", "nccl")),
    ("what a batch takes the GPU, for balanced batches", ("tests/ddp/test_device_time.py", "-k", "gpu_tells")),
)


def _run(arguments: tuple[str, ...]) -> tuple[str, bool]:
    """Run some tests; returns what came of them in words, and whether that is good."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments], check=False)
        if not report.exists():
            return "pytest did not come to its end", False
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = numbers["tests"] - numbers["failures"] - numbers["errors"] - numbers["skipped"]
    words = ", ".join(f"{count} {name}" for name, count in {"passed": passed, **numbers}.items() if name != "tests")
    return words, passed > 0 and not numbers["failures"] + numbers["errors"]


def main() -> int:
    """Returns 0 if all that could run was good, or there is no GPU; else 1."""
    if not torch.cuda.is_available():
        print(
            f"There is no CUDA device here (torch {torch.__version__}): nothing was run, and nothing is known of GPUs."
        )
        return 0
    lines = [f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}"]
    good = True
    for title, arguments in SECTIONS:
        began = time.monotonic()
        words, fine = _run(arguments)
        good = good and fine
        lines.append(f"{'good' if fine else 'BAD ':4} {title}: {words}, {time.monotonic() - began:.0f} s")
    for backend, ranks in EXPOSED:
        if backend == "nccl" and not dist.is_nccl_available():
            lines.append("---- exposed time, nccl: there is no NCCL")
            continue
        try:
            with RankPool(ranks) as pool:
                lines += [f"     {line}" for line in profiled(pool, backend)]
        except Exception as error:
            good = False
            lines.append(f"BAD  exposed time, {backend}: {error}")
    print("\n".join(["", *lines, "All of it is good." if good else "Not all of it is good."]))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
