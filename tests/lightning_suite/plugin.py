"""The pytest plugin in each test process: selects tests, and says what happened."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.lightning_suite.on_cpu import ON_CPU, STANDALONE, skip_less, train_on_cpu
from tests.lightning_suite.record import RECORD_VARIABLE, Record
from tests.lightning_suite.selection import Mentions
from tests.lightning_suite.stand_in import name_test

_OTHER_STRATEGIES = re.compile(r"fsdp|deepspeed|model_parallel|xla|tensorrt|onnx", re.IGNORECASE)

_record_path = os.environ[RECORD_VARIABLE]
_tells = "LOCAL_RANK" not in os.environ  # other ranks run the same test and tell only if it fails

skip_less()


def _marked(item: pytest.Item, mark_name: str) -> bool:
    return any(mark.kwargs.get(mark_name) for mark in item.iter_markers("skipif"))


def _skip_reason(item: pytest.Item) -> str | None:
    if _marked(item, ON_CPU) and _OTHER_STRATEGIES.search(item.nodeid):
        return "Requires: GPUs, and is about another strategy"
    for mark in item.iter_markers("skipif"):
        condition = mark.args[0] if mark.args else mark.kwargs.get("condition")
        if condition is True:
            return str(mark.kwargs.get("reason", "no reason given"))
    skip = item.get_closest_marker("skip")
    return None if skip is None else str(skip.kwargs.get("reason", "no reason given"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.collectonly:
        return
    mentions: dict[Path, Mentions] = {}
    for item in items:
        found = mentions.setdefault(item.path, Mentions(item.path.read_text()))
        name = item.nodeid.split("::")[1].partition("[")[0]
        if name in found:
            Record(_record_path, item.nodeid).write(
                "collected",
                standalone=_marked(item, STANDALONE),
                moved=_marked(item, ON_CPU),
                skipped=_skip_reason(item),
            )
    Record(_record_path, "").write("all collected")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and _tells:
        Record(_record_path, report.nodeid).write("unreadable", message=report.longreprtext.strip().splitlines()[-1])


def pytest_runtest_logstart(nodeid: str) -> None:
    record = Record(_record_path, nodeid)
    name_test(record)
    if _tells:
        record.write("started")


def pytest_runtest_setup(item: pytest.Item) -> None:
    train_on_cpu(_marked(item, ON_CPU))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test that fails while it is cleaned up, or on another rank only, has failed as well.
    if report.failed or (_tells and (report.when == "call" or report.outcome != "passed")):
        Record(_record_path, report.nodeid).write(report.outcome, message=report.longreprtext[-20000:])
