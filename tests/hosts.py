"""Partners on another simulated machine of the same IMEX domain."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from streamalloc import ipc
from streamalloc.ipc.wire.descriptor import Descriptor
from tests.processes import Opened, Partner, There


class Host(Partner):
    """Process on another simulated machine. Bytes can be sent to it and received, but no file descriptors."""

    def __init__(self, name: str = "b", **machine: Any) -> None:
        super().__init__(False, fabric=True, host=name, **machine)
        self.run(_settle_on, name)

    def begin(self, function: Callable[..., Any], *args: Any, fds: Iterable[ipc.Fd | int] = ()) -> None:
        assert not list(fds)
        super().begin(function, *args)

    def opens(self, data: bytes, name: str = "it") -> Opened:
        """Make the process open the memory that ``data`` describes, and keep it under ``name``."""
        return self.open(ipc.Shared(Descriptor.from_bytes(data), {}), name, fds=())

    def bytes_of(self, name: str, **options: Any) -> bytes:
        """Make the process share what it keeps under ``name``, and return the descriptor as bytes. The process keeps
        the result of ``ipc.share``, so that the descriptor stays valid.
        """
        data: bytes = self.run(share_bytes, name, options)
        return data


def _settle_on(there: There, name: str) -> None:
    os.environ["STREAMALLOC_HOST"] = name


def share_bytes(there: There, name: str, options: dict[str, Any]) -> bytes:
    """Share what is kept under ``name``, keep the result, and return the descriptor as bytes."""
    return bytes(there.keep(f"shared {name}", ipc.share(there.kept[name], **options)))
