"""pytest with our strategy in ddp's place, in the processes that its tests spawn too.

A spawned process imports the main module of its parent before anything else. So a class that a test derives from
DDPStrategy is derived from ours there as well, which a plugin of pytest could not see to.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.lightning_suite.record import BASELINE_VARIABLE
from tests.lightning_suite.stand_in import take_the_place_of_ddp

if BASELINE_VARIABLE not in os.environ:
    take_the_place_of_ddp()

if __name__ == "__main__":
    sys.exit(pytest.main())
