"""Virtual memory of two devices side by side: each device's access to each mapping, and copies between them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.facts.enums import DEVICE, NO_ACCESS, READ, READWRITE
from tests.facts.support import PAGE, MiB, Rig, said, value
from tests.facts.teams import Contexts

pytestmark = pytest.mark.gpus(2)

FIRST, SECOND = (DEVICE, 0, READWRITE), (DEVICE, 1, READWRITE)


class Pair(Contexts):
    """A page of each device's memory, mapped side by side, and what is in each device's context."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        of_first = int(rig.plain(2 * PAGE))
        self.use(1)
        self.plain = of_first, int(rig.plain(2 * PAGE))
        self.use(0)
        self.start = rig.reserve(8 * PAGE)  # of device 0's page; device 1's is the next
        for device in (0, 1):
            rig.map(self.start + device * PAGE, rig.memory(id=device))

    def set_access(self, *wanted: tuple[int, int, int], pages: int = 2) -> str:
        return self.rig.set_access(self.start, pages * PAGE, *wanted)

    def flags(self, page: int) -> list[int | str]:
        """Flags of device 0 and device 1."""
        return [self.rig.get_access(self.start + page * PAGE, DEVICE, device) for device in (0, 1)]

    def fill(self, page: int, size: int) -> str:
        """The result of a fill in the current context."""
        return said(self.raw.cuMemsetD8(self.start + page * PAGE, 1, size))

    def peer_copy(self, on: int, target: int, to: int, source: int, of: int) -> str:
        """The result of a copy of a page between contexts, on a stream of the device ``on``."""
        contexts, stream = self.contexts, self.streams[on]
        answer = self.raw.cuMemcpyPeerAsync(target, contexts[to], source, contexts[of], PAGE, stream)
        value(self.raw.cuStreamSynchronize(stream))
        return said(answer)


@pytest.fixture
def pair(rig: Rig) -> Pair:
    return Pair(rig)


def test_no_device_has_access_at_first(pair: Pair) -> None:
    assert pair.flags(1) == [NO_ACCESS, NO_ACCESS]


def test_memory_names_its_own_device(pair: Pair, on_cuda: bool) -> None:
    """Whatever the current context is, and without access. Bindings 13.3 read 0, so that libcuda is asked."""
    pair.use(1)
    pinned = int(pair.rig.pinned(64))
    pair.use(0)
    ordinal = pair.raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

    def device_of(address: int) -> int:
        if not on_cuda:
            return int(value(pair.raw.cuPointerGetAttribute(ordinal, address)))
        found, cuda = ctypes.c_int(-1), ctypes.CDLL("libcuda.so.1")
        assert cuda.cuPointerGetAttribute(ctypes.byref(found), int(ordinal), ctypes.c_uint64(address)) == 0
        return found.value

    own = (pair.plain[1], pinned, pair.start + PAGE)
    assert [device_of(address) for address in (*own, pair.plain[0], pair.start)] == [1, 1, 1, 0, 0]


def test_memory_is_taken_from_its_own_device(pair: Pair) -> None:
    pair.use(1)
    free = pair.rig.device_free()
    pair.use(0)
    pair.rig.memory(64 * MiB, id=1)
    pair.use(1)
    assert free - pair.rig.device_free() == 64 * MiB


class TestAccess:
    def test_of_one_device_to_both(self, pair: Pair) -> None:
        assert pair.set_access(FIRST) == "SUCCESS"
        assert pair.flags(1)[1] == NO_ACCESS
        assert pair.fill(0, 2 * PAGE) == "SUCCESS"
        pair.rig.synchronize()
        pair.use(1)
        assert pair.fill(1, 4) == "INVALID_VALUE"

    def test_to_read(self, pair: Pair) -> None:
        assert pair.set_access(FIRST) == "SUCCESS"
        value(pair.raw.cuMemsetD8(pair.start, 1, PAGE))
        pair.rig.synchronize()
        pair.use(1)
        assert pair.set_access((DEVICE, 1, READ)) == "SUCCESS"
        assert pair.flags(0) == [READWRITE, READ]
        assert pair.fill(0, 4) == "INVALID_VALUE"
        assert pair.rig.read(pair.start, 4) == [1] * 4

    def test_to_write_to_one_and_read_the_other(self, pair: Pair) -> None:
        pair.use(1)
        assert pair.set_access((DEVICE, 1, READ)) == "SUCCESS"
        assert pair.set_access(SECOND, pages=1) == "SUCCESS"
        assert said(pair.raw.cuMemcpyHtoD(pair.start, np.full(8, 9, np.uint8), 8)) == "SUCCESS"
        assert pair.fill(0, 2 * PAGE) == "INVALID_VALUE"
        assert said(pair.raw.cuMemcpyDtoD(pair.start, pair.start + PAGE, 8)) == "SUCCESS"

    def test_of_both_to_both(self, pair: Pair) -> None:
        assert pair.set_access(FIRST, SECOND) == "SUCCESS"
        for device in (0, 1):
            pair.use(device)
            assert pair.fill(0, 2 * PAGE) == "SUCCESS"
            pair.rig.synchronize()

    def test_taken_away(self, pair: Pair) -> None:
        assert pair.set_access(FIRST, SECOND) == "SUCCESS"
        assert pair.set_access((DEVICE, 1, NO_ACCESS)) == "SUCCESS"
        assert [pair.flags(page)[1] for page in (0, 1)] == [NO_ACCESS] * 2


class TestCopies:
    @pytest.fixture(autouse=True)
    def own_access(self, pair: Pair) -> None:
        """Each device's access to its own page, and no more."""
        for device, wanted in enumerate((FIRST, SECOND)):
            assert pair.rig.set_access(pair.start + device * PAGE, PAGE, wanted) == "SUCCESS"

    def test_between_contexts(self, pair: Pair) -> None:
        """Need no more: each side is reached in its own context."""
        first, second = pair.start, pair.start + PAGE
        pair.use(1)
        assert pair.peer_copy(1, pair.plain[1], 1, first, 0) == "SUCCESS"
        pair.use(0)
        assert pair.peer_copy(0, pair.plain[0], 0, second, 1) == "SUCCESS"
        assert pair.peer_copy(0, first, 0, second, 1) == "SUCCESS"

    @pytest.mark.parametrize("name", ["cuMemcpyDtoDAsync", "cuMemcpyAsync"])
    def test_in_one_context(self, pair: Pair, name: str) -> None:
        pair.use(1)
        answer = getattr(pair.raw, name)(pair.plain[1], pair.start, PAGE, pair.streams[1])
        assert said(answer) == "INVALID_VALUE"
        pair.rig.synchronize()

    def test_over_both_pages(self, pair: Pair) -> None:
        assert pair.set_access(FIRST, SECOND) == "SUCCESS"
        pair.use(1)
        target, (first, second) = pair.plain[1], pair.contexts
        assert said(pair.raw.cuMemcpyPeer(target, second, pair.start, first, 2 * PAGE)) == "SUCCESS"
        assert said(pair.raw.cuMemcpyDtoD(target, pair.start, 2 * PAGE)) == "SUCCESS"
        pair.rig.synchronize()

    @pytest.mark.parametrize("page", [0, 1])
    def test_pointer(self, pair: Pair, page: int) -> None:
        address = pair.start + page * PAGE
        expected: dict[str, int | str] = {
            "MEMORY_TYPE": 2,
            "ACCESS_FLAGS": NO_ACCESS if page else READWRITE,
            "DEVICE_POINTER": "INVALID_VALUE" if page else address,
        }
        assert pair.rig.pointer_attributes(address, expected) == expected
