"""The devices that ``CUDA_VISIBLE_DEVICES`` shows, and another process's memory of one that it hides."""

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamalloc import testing
from streamalloc.driver import simulated
from streamalloc.driver.bindings import opaque_bytes
from tests.facts.enums import DEVICE, NO_ACCESS, POSIX_FD, READWRITE
from tests.facts.support import PAGE, MiB, Rig
from tests.facts.support import value as ok
from tests.processes import FD, Descriptor, Kept, Member, Opaque, Peer, bytes_of, finished, python

pytestmark = pytest.mark.gpus(2)

Seen = Callable[[str], tuple[str, list[str]]]

PROGRAM = """
import ctypes, json, os, sys
from cuda.bindings import driver
def seen(value):
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    result = driver.cuInit(0)[0]
    structs = [] if result else [driver.cuDeviceGetUuid(n)[1] for n in range(driver.cuDeviceGetCount()[1])]
    return result.name, [ctypes.string_at(int(one.getPtr()), 16).hex() for one in structs]
"""
# Indices of the devices that are shown; X and Y stand for the ids of both.
SHOWN = {
    **{"0": [0], "1": [1], "0,1": [0, 1], "1,0": [1, 0], "0,1,2": [0, 1], "0,2,1": [0], "0,-1,1": [0], "0,": [0]},
    **{"0,,1": [0], " 1": [1], "1 ,0": [1, 0], " 1 , 0 ": [1, 0], "\t1": [1], "1\n": [1]},
    **{"1abc,0": [1, 0], "0,abc,1": [0], "1 0": [1], "1.5": [1], "0-1": [0], "0x1": [0], "01": [1], "+1": [1]},
    **{"-0": [0], "4294967296": [0], "4294967297": [1]},
    **{"GPU-Y": [1], "GPU-Y,GPU-X": [1, 0], "GPU-X,GPU-Y,": [0, 1], "GPU-Y , GPU-X": [1], "GPU-Yx": [1]},
    **{"GPU-Y00": [1]},
    **{"GPU-X,0": [0], "0,GPU-Y": [0], "MIG-X": [0], "0,MIG-GPU-Y/1/0": [0]},
}
NONE = ["", " ", "-1", "-1,0", "2", ",0", "abc", "all", "NoDevFiles", "'1'", "99999999999"]
NONE += ["GPU-", "gpu-Y", "Y", "MIG-GPU-X/1/0"]
TWICE = ["0,0", "1,1", "GPU-X,GPU-X"]


@pytest.fixture
def seen(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Answer of cuInit, and the ids of the devices that a process sees."""

    def see(value: str) -> tuple[str, list[str]]:
        if on_cuda:
            ran = finished(python(f"{PROGRAM}print(json.dumps(seen(sys.argv[1])))", value), on_cuda)
            result, ids = json.loads(ran.stdout)
            return result, ids
        names: dict[str, Any] = {}
        with testing.install(simulated(devices=2, name="visible")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
            exec(PROGRAM, names)
            seen: Seen = names["seen"]
            return seen(value)

    return see


def test_what_a_value_shows(seen: Seen, on_cuda: bool) -> None:
    ids = seen("0,1")[1]

    def answer(text: str) -> tuple[str, list[int]]:
        for letter, one in zip("XY", ids, strict=True):
            text = text.replace(letter, str(uuid.UUID(one)))
        result, found = seen(text)
        return result.removeprefix("CUDA_").removeprefix("ERROR_"), [ids.index(one) for one in found]

    assert {text: answer(text) for text in SHOWN} == {text: ("SUCCESS", shown) for text, shown in SHOWN.items()}
    assert {answer(text)[0] for text in NONE} == {"NO_DEVICE"}
    assert {answer(text)[0] for text in TWICE} == {"INVALID_DEVICE"}


class TestAnotherProcessSMemory:
    """Of device 0, in a process that sees device 1 alone. It says device 0 there, too."""

    @pytest.fixture
    def peer(self, rig: Rig, on_cuda: bool) -> Iterator[Peer]:
        peer = Peer(on_cuda, devices=ok(rig.raw.cuDeviceGetCount()), visible="1")
        peer.said("cuStreamCreate", 1, keep="stream")
        yield peer
        peer.close()

    @staticmethod
    def shares(peer: Peer, rig: Rig, there: int, address: int) -> None:
        """The process reads and writes the memory of this one."""
        number = int(rig.raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        assert peer.value("cuPointerGetAttribute", Member("CUpointer_attribute", number), there) == 0
        assert list(peer.rig("read", there, 8)) == [9] * 8
        assert peer.said("cuMemsetD8", there, 5, 8) == peer.said("cuCtxSynchronize") == "SUCCESS"
        assert list(rig.read(address, 8)) == [5] * 8

    @staticmethod
    def written(rig: Rig, address: int) -> int:
        ok(rig.raw.cuMemsetD8(address, 9, 64))
        ok(rig.raw.cuCtxSynchronize())
        return address

    def test_plain(self, rig: Rig, peer: Peer) -> None:
        address = self.written(rig, int(rig.plain(4 * MiB)))
        handle = Opaque("CUipcMemHandle", bytes_of(ok(rig.raw.cuIpcGetMemHandle(address))))
        self.shares(peer, rig, int(peer.value("cuIpcOpenMemHandle", handle, 1)), address)

    def test_pooled(self, rig: Rig, peer: Peer) -> None:
        """The device has no access to the pool, and can use it all the same."""
        pool, stream = rig.pool(handle_types=POSIX_FD), rig.stream()
        peer.value("cuMemPoolImportFromShareableHandle", Descriptor(rig.exported(pool)), FD, 0, keep="pool")
        assert peer.rig("access_flags", Kept("pool"), DEVICE, 0) == NO_ACCESS
        address = self.written(rig, rig.allocate(pool, 4 * MiB, stream))
        data = Opaque("CUmemPoolPtrExportData", opaque_bytes(ok(rig.raw.cuMemPoolExportPointer(address))))
        self.shares(peer, rig, int(peer.value("cuMemPoolImportPointer", Kept("pool"), data)), address)

    def test_physical(self, rig: Rig, peer: Peer) -> None:
        memory = rig.memory(handle_types=POSIX_FD)
        address = rig.map(rig.reserve(PAGE), memory)
        assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        peer.value("cuMemImportFromShareableHandle", Descriptor(rig.exported(memory)), FD, keep="memory")
        mapped = peer.rig("map", peer.rig("reserve", PAGE), Kept("memory"))
        assert peer.rig("set_access", mapped, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        self.shares(peer, rig, mapped, self.written(rig, address))


def test_bus_ids(rig: Rig, on_cuda: bool) -> None:
    """A device that is hidden, or not there, is an invalid one; any other text is an invalid value."""
    peer = Peer(on_cuda, devices=ok(rig.raw.cuDeviceGetCount()), visible="1")
    try:
        first, second = (ok(rig.raw.cuDeviceGetPCIBusId(20, number)) for number in range(2))
        assert peer.value("cuDeviceGetByPCIBusId", second) == 0
        texts = (first, b"0000:fe:1e.0", b"hello")
        answers = [peer.said("cuDeviceGetByPCIBusId", text) for text in texts]
        assert answers == ["INVALID_DEVICE", "INVALID_DEVICE", "INVALID_VALUE"]
    finally:
        peer.close()
