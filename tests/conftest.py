from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.rank_pool import RankPool, preload

# torch's store asks for the name of each address that connects to it. Where a name server leaves a question unanswered,
# the resolver asks again after 5 seconds: several times in a file of tests.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


_OF_A_LAUNCH = (
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "RANK",
    "WORLD_SIZE",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        default="all",
        metavar="all|none|[DAY/7] [FILES]",
        help="which slow tests are run: a seventh, and of each slow test in FILES one case; the others always are",
    )


def pytest_configure(config: pytest.Config) -> None:
    """No property fails because the machine is busy. New examples are for when all slow tests are run.

    Ranks are forked with what they need imported.
    """
    everything = config.getoption("--slow") == "all"
    settings.register_profile(
        "tests",
        deadline=None,
        derandomize=not everything,
        max_examples=100 if everything else 15,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")
    preload(now="PYTEST_XDIST_WORKER" in os.environ)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _deal_out_waits(items)
    chosen: str = config.getoption("--slow")
    if chosen == "all":
        return
    words = set(chosen.split())
    begun: set[str] = set()  # tests of the files that are named, of which there is a case

    def is_run(name: str) -> bool:
        if f"{zlib.crc32(name.encode()) % 7}/7" in words:  # of the name alone: it is there each week, whatever is added
            return True
        test = name.partition("[")[0]
        if name.partition("::")[0] not in words or test in begun:
            return False
        begun.add(test)
        return True

    left_out = [item for item in items if item.get_closest_marker("slow") and not is_run(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    out = set(left_out)
    items[:] = [item for item in items if item not in out]


def _deal_out_waits(items: list[pytest.Item]) -> None:
    """Put files whose ranks mostly wait for each other evenly between those that keep the processors busy."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    waiting = [file for file in by_file if file.startswith(("tests/faults/", "tests/failures/"))]
    busy = [file for file in by_file if file not in waiting]
    # The last third are rooms of short files, which end together.
    place = {file: (index + 0.5) * (2 / 3) / len(waiting) for index, file in enumerate(waiting)}
    place.update((file, index / len(busy)) for index, file in enumerate(busy))
    items[:] = [item for file in sorted(by_file, key=lambda file: place[file]) for item in by_file[file]]


@pytest.fixture(autouse=True)
def no_traces_of_a_launch() -> Iterator[None]:
    """Take back what Lightning leaves in the environment.

    Where LOCAL_RANK is set, a Trainer starts no processes; a seed of seed_everything reaches all ranks started later.
    """
    before = {name: os.environ.get(name) for name in _OF_A_LAUNCH}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()
        pytest.fail("The default process group was left behind: train on a RankPool, not in the process of the tests.")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_plain_ranks() -> Iterator[RankPool]:
    """Without a default process group, for tests that make one of their own; Lightning leaves its behind."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_plain_ranks() -> Iterator[RankPool]:
    """See ``two_plain_ranks``."""
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_plain_ranks() -> Iterator[RankPool]:
    """See ``two_plain_ranks``."""
    with RankPool(4) as pool:
        yield pool
