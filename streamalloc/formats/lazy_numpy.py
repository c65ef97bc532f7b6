"""NumPy as ``np``, imported by the first use of one of its names.

The import of NumPy takes half as long as that of the bindings, and programs that only allocate need no arrays. The
modules that every program loads take ``np`` from here.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if "numpy" not in sys.modules:
                # On a thread of its own, where no signal handler runs: after an exception in its import, the process
                # cannot import NumPy again.
                thread = threading.Thread(target=importlib.import_module, args=("numpy",))
                thread.start()
                thread.join()
            import numpy

            # Stored, so that later uses find the name without this call.
            found = self.__dict__[name] = getattr(numpy, name)
            return found

    np = _Numpy("numpy")
