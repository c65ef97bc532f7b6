"""Processes of another simulated machine of the IMEX domain."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from streamalloc import ipc
from streamalloc.ipc.wire.descriptor import Descriptor
from tests.processes import Opened, Partner, There


class Host(Partner):
    """A process of another machine: bytes go there and come back, and no file descriptor."""

    def __init__(self, name: str = "b", **machine: Any) -> None:
        super().__init__(False, fabric=True, host=name, **machine)
        self.run(_settle_on, name)

    def begin(self, function: Callable[..., Any], *args: Any, fds: Iterable[ipc.Fd | int] = ()) -> None:
        assert not list(fds)
        super().begin(function, *args)

    def opens(self, data: bytes, name: str = "it") -> Opened:
        """Have it open a descriptor."""
        return self.open(ipc.Shared(Descriptor.from_bytes(data), {}), name, fds=())

    def bytes_of(self, name: str, **options: Any) -> bytes:
        """The descriptor of what it shares. The result of share is kept there, as it is here while bytes travel."""
        data: bytes = self.run(share_bytes, name, options)
        return data


def _settle_on(there: There, name: str) -> None:
    os.environ["STREAMALLOC_HOST"] = name


def share_bytes(there: There, name: str, options: dict[str, Any]) -> bytes:
    """Share what is kept under a name: the descriptor."""
    return bytes(there.keep(f"shared {name}", ipc.share(there.kept[name], **options)))
