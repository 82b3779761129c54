"""Runs a module as ``python -m`` does, in a rank of a nursery; which, and its arguments, is JSON in ``sys.argv[1]``."""

from __future__ import annotations

import json
import runpy
import sys

__all__: list[str] = []

if __name__ == "__main__":
    module, *arguments = json.loads(sys.argv[1])["argv"]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
