"""What the timeline says on a real shaped link: communication is hidden, and the bytes are the interface's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shaped_link import ShapedLink
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, Trace, read_timeline
from tests.links.emulated_fit import FIRST_STEP, LAST_STEP, LAYERS, PARAMETERS

pytestmark = [pytest.mark.root, pytest.mark.slow]

_MBIT = 500.0
_SCRIPT = Path(__file__).with_name("emulated_fit.py")


def _fit(folder: Path, communication_over_compute: float) -> tuple[Trace, dict[str, Any]]:
    """Fit on two hosts; how long the link takes for a step's gradients is given as a multiple of a step's compute."""
    possible, reason = ShapedLink.available()
    if not possible:
        pytest.skip(reason)
    communication = LAYERS * PARAMETERS * 4 * 8 / (_MBIT * 1e6)
    # A layer's forward; its backward takes twice that.
    seconds = communication / communication_over_compute / (3 * LAYERS)
    with ShapedLink(hosts=2, mbit=_MBIT) as link:
        command = [sys.executable, str(_SCRIPT), str(folder), str(seconds)]
        ranks = [link.popen(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for host in range(2)]
        outputs = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return read_timeline(folder / "trace.json"), json.loads((folder / "rank0.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, dict[str, Any]]:
    return _fit(tmp_path_factory.mktemp("balanced"), 1.3)


def test_most_communication_runs_under_compute_and_part_of_it_under_the_next_forward(
    run: tuple[Trace, dict[str, Any]],
) -> None:
    summary = run[0].summary()
    hidden = summary.under_forward + summary.under_backward
    assert hidden >= 0.5 * summary.communication_seconds
    assert summary.under_forward > 0.05 * summary.communication_seconds
    assert run[1]["deferred_share"] >= 0.9  # the first of few steps is synchronised


def test_bytes_in_the_trace_are_those_of_the_interface(run: tuple[Trace, dict[str, Any]]) -> None:
    trace, counted = run
    traced = sum(
        float(span.args["bytes"])
        for span in trace.select(COMMUNICATION)
        if span.step is not None and FIRST_STEP < span.step <= LAST_STEP
    )
    assert traced == pytest.approx((LAST_STEP - FIRST_STEP) * LAYERS * PARAMETERS * 4)
    assert counted["interface"] == pytest.approx(traced, rel=0.05)


def test_first_layers_overtake_last_layers_that_were_queued_before_them(tmp_path: Path) -> None:
    """On a congested link partitions pile up; the first layer's, ready last, must not wait for all of them."""
    trace, _ = _fit(tmp_path, 4.0)
    overtaken = 0
    for step in range(FIRST_STEP, LAST_STEP):
        spans = [span for span in trace.select(COMMUNICATION) if span.step == step]
        first = min(int(span.args["priority"]) for span in spans)
        sent = min(span.start for span in spans if span.args["priority"] == first)
        overtaken += sum(span.start > sent for span in spans if span.args["priority"] != first)
    assert overtaken > 3 * (LAST_STEP - FIRST_STEP)  # several per step; in order of arrival there would be none
