"""Arguments that are refused, before any addresses are reserved or memory is made."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.support import Account
from tests.vmm.support import HOST, PAGE

FD = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
NUMA = sa.MemLocation.host_numa(0)
NOWHERE = sa.MemLocation.device(99)
SWAPPED = np.dtype(np.float32).newbyteorder()
Refused = tuple[dict[str, Any], type[Exception], str]


def _range(device: sa.Device, **arguments: Any) -> Any:
    return vmm.AddressRange(**arguments, driver=device.driver)


def _memory(device: sa.Device, **arguments: Any) -> Any:
    return vmm.PhysicalMemory(**{"where": device, "nbytes": PAGE, **arguments}, driver=device.driver)


def _stripe(device: sa.Device, **arguments: Any) -> Any:
    return vmm.stripe([device], **{"nbytes": PAGE, **arguments})


TABLE: dict[Callable[..., Any], list[Refused]] = {
    _range: [
        ({"nbytes": 0}, ValueError, "nbytes=0"),
        ({"nbytes": PAGE + 4096}, ValueError, f"nbytes={PAGE + 4096}"),
        ({"nbytes": -PAGE}, ValueError, "nbytes"),
        ({"nbytes": 2e6}, TypeError, "nbytes"),
        ({"nbytes": PAGE, "alignment": 3}, ValueError, "alignment=3"),
        ({"nbytes": PAGE, "alignment": 3 * PAGE}, ValueError, "alignment"),
        ({"nbytes": PAGE, "alignment": "2"}, TypeError, "alignment"),
        ({"nbytes": PAGE, "address": 4096}, ValueError, "address"),
        ({"nbytes": PAGE, "address": PAGE, "alignment": 1 << 30}, ValueError, "address"),
    ],
    _memory: [
        *(({"nbytes": size}, ValueError, rf"nbytes={size}.*2 MiB") for size in (1, 4096, PAGE - 1, PAGE + 1, 3 << 20)),
        ({"nbytes": 0}, ValueError, "nbytes=0"),
        ({"nbytes": 0, "round_up": True}, ValueError, "nbytes=0"),
        *(({"where": where}, TypeError, "where") for where in (None, 0.5, "cuda:0")),
        ({"where": NOWHERE}, ValueError, "id=99"),
        ({"where": sa.MemLocation.none()}, ValueError, "location"),
        *(({"where": where, "compressible": True}, ValueError, "compressible") for where in (HOST, NUMA)),
        *(({"where": where, "gpu_direct_rdma": True}, ValueError, "GPUDirect") for where in (HOST, NUMA)),
        ({"tile_pool": True, "compressible": True}, ValueError, "tile pool"),
        ({"tile_pool": True, "handle_types": FD}, ValueError, "tile pool"),
        ({"where": HOST, "handle_types": FD}, ValueError, "HOST"),
    ],
    vmm.GrowableBuffer: [
        ({"capacity": 0}, ValueError, "capacity=0"),
        ({"capacity": -1}, ValueError, "capacity"),
        ({"capacity": 1.5}, TypeError, "capacity"),
        ({"capacity": PAGE, "nbytes": PAGE + 1}, ValueError, f"nbytes={PAGE + 1}.*capacity"),
        ({"capacity": PAGE, "chunk": -1}, ValueError, "chunk"),
        ({"capacity": PAGE, "access": HOST}, ValueError, "access"),
        ({"capacity": PAGE, "access": NOWHERE}, ValueError, "id=99"),
        ({"capacity": PAGE, "handle_types": 1}, TypeError, "handle_types"),
        ({"capacity": PAGE, "handle_types": sa.MemHandleType.WIN32}, ValueError, "WIN32"),
    ],
    _stripe: [
        ({"nbytes": 0}, ValueError, "nbytes=0"),
        ({"nbytes": 1.0}, TypeError, "nbytes"),
        ({"access": HOST}, ValueError, "access"),
        ({"access": NOWHERE}, ValueError, "id=99"),
        ({"handle_types": 1}, TypeError, "handle_types"),
    ],
    vmm.SparseArray: [
        *(({"shape": shape}, ValueError, "shape") for shape in ((1024,), (2, 2, 2, 2), (0, 256))),
        ({"shape": (256.0, 256)}, TypeError, "shape"),
        *(({"shape": (256, 256), "dtype": dtype}, ValueError, "dtype") for dtype in (np.float64, bool)),
        ({"shape": (256, 256), "dtype": SWAPPED}, ValueError, "native byte order"),
        ({"shape": (256, 256), "channels": 3}, ValueError, "channels=3"),
        ({"shape": (256, 256), "layered": True}, ValueError, "layered"),
        ({"shape": (256, 256), "levels": -1}, ValueError, "levels"),
    ],
}
MAKES = ("cuMemAddressReserve", "cuMemCreate", "cuArray3DCreate", "cuMipmappedArrayCreate")


@pytest.mark.parametrize(
    ("make", "arguments", "error", "words"),
    [pytest.param(make, *refused, id=f"{make.__name__} {refused[0]}") for make in TABLE for refused in TABLE[make]],
)
def test_are_refused(
    account: Account, make: Callable[..., Any], arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(account.device, **arguments)
    assert account.calls(*MAKES) == []
