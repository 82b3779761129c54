"""Python imports this file when a process of ``lightning-bytescheduler check`` starts. It registers our strategies.

The registration finds in the environment what the check has to do with Lightning. Another ``sitecustomize`` on the path
is run as well.
"""

import importlib.machinery
import importlib.util
import os
import sys

_paths = [path for path in sys.path if os.path.abspath(path or ".") != os.path.dirname(os.path.abspath(__file__))]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _paths)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

import lightning_bytescheduler  # noqa: E402, F401
