"""Start-up code of a child process. Python imports a module of this name when it starts.

The child installs a simulated machine if the parent process has installed one
(:mod:`streamalloc.testing.installing`). It checks all driver calls if the parent process does so
(:mod:`streamalloc.cupti`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from importlib.machinery import PathFinder


def _run_next() -> None:
    """Run the next module ``sitecustomize`` on the path, outside of this folder, because this one hides it."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [one for one in sys.path if os.path.abspath(one) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _has_bindings() -> bool:
    """Return whether this interpreter has the module ``cuda.bindings``, which the simulated machine replaces."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def _call(module: str, function: str) -> None:
    if importlib.util.find_spec("streamalloc") is None:
        sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))
    getattr(importlib.import_module(module), function)()


_run_next()
if _has_bindings():
    try:
        if os.environ.get("STREAMALLOC_INSTALL"):
            _call("streamalloc.testing.installing", "install_in_child")
        if os.environ.get("STREAMALLOC_CHECK_ALL"):
            _call("streamalloc.cupti.checking", "check_child")
    except Exception:
        # The program must not run now: it would use the real driver, or run unchecked.
        traceback.print_exc()
        raise SystemExit("streamalloc: the driver or check of the parent process could not be installed") from None
