from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Nothing is told to anybody. The workers inherit it.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
# Ray may count on a machine that has just gone, and waits for workers on it.
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "20"

MACHINE = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}


# A machine that has gone is noticed after 5 s, not half a minute.
SOON_MISSED = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 10}


class _Missing(pytest.File):
    """In the place of a test module."""

    def collect(self) -> Iterator[Any]:
        pytest.skip("needs ray: `make ray` installs what is missing and runs these tests")


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Collector | None:
    return _Missing.from_parent(parent, path=module_path) if importlib.util.find_spec("ray") is None else None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two machines of one processor each, on this one."""
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    services.node_ip_address_from_perspective = lambda *_: "127.0.0.1"  # Ray would listen on the machine's own address
    made = Cluster(
        initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False, "_system_config": SOON_MISSED}
    )
    made.add_node(**MACHINE)
    paths = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(address=made.address, runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
