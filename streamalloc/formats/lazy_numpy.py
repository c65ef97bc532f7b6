"""NumPy as ``np``, which is imported when one of its names is first used.

The import of NumPy takes half as long as the import of the bindings, and programs that only allocate need no arrays. So
modules that every program loads import ``np`` from here.
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
                # On a thread, where no signal handler runs: after an exception during its import, the process could not
                # import NumPy again.
                thread = threading.Thread(target=importlib.import_module, args=("numpy",))
                thread.start()
                thread.join()
            import numpy

            # The object is stored, so that later uses find it without this call.
            found = self.__dict__[name] = getattr(numpy, name)
            return found

    np = _Numpy("numpy")
