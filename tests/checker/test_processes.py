"""Hazards between processes: what one frees while another still has it, and descriptors of the same file."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.checker import interprocess
from streamalloc.checker.interprocess import _MOST_ACTORS, BoardEntry, OpenFiles
from streamalloc.driver import processes
from streamalloc.driver.bindings import cuda, opaque_bytes, opaque_struct
from streamalloc.driver.wrappers import Wrapper
from streamalloc.testing import Gate
from tests.checker.corpus import PAGE, SIZE, Bench
from tests.processes import Partner, There
from tests.support import KEEP, eventually

_INTERPROCESS = int(cuda.CUevent_flags.CU_EVENT_INTERPROCESS | cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
_KIND = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@pytest.fixture(scope="module")
def partner(on_cuda: bool) -> Iterator[Partner]:
    with Partner(on_cuda) as partner:
        yield partner


@pytest.fixture
def bench(machine: Any) -> Iterator[Bench]:
    with Bench(sd.checked(machine)) as bench:
        yield bench


def kinds(bench: Bench) -> list[str]:
    return [one.kind for one in bench.driver.hazards]


def shared_pool(bench: Bench) -> Any:
    return bench.keep(sa.MemoryPool(bench.device, handle_types=_POSIX, release_threshold=KEEP))


def of_shared_pool(bench: Bench) -> Any:
    """A buffer of a pool of its own that another process can have."""
    return shared_pool(bench).allocate(SIZE, bench.a)


def exported(bench: Bench, buffer: sa.Buffer) -> tuple[int, bytes]:
    """A descriptor of the pool, which the test's end closes, and the export data of its memory."""
    pool: Any = buffer.owner
    fd = bench.raw("cuMemPoolExportToShareableHandle", cuda.CUmemoryPool(pool.handle), _KIND, 0)
    bench._stack.callback(os.close, fd)
    return fd, opaque_bytes(bench.raw("cuMemPoolExportPointer", buffer.address))


def event_handle(bench: Bench, event: sa.Event) -> bytes:
    return opaque_bytes(bench.raw("cuIpcGetEventHandle", cuda.CUevent(event.handle)))


def _import(there: There, data: bytes, event: bytes = b"") -> None:
    """Import memory, and an event if there is one."""
    driver: Any = sd.checked(there.driver)
    with there.device.current():
        pool = driver.cuMemPoolImportFromShareableHandle(there.came[0].fileno(), _KIND, 0)[1]
        address = driver.cuMemPoolImportPointer(pool, opaque_struct("CUmemPoolPtrExportData", data))[1]
        opened = driver.cuIpcOpenEventHandle(opaque_struct("CUipcEventHandle", event))[1] if event else None
        there.keep("import", (driver, pool, address, opened, driver.cuStreamCreate(1)[1]))


def _free(there: There) -> list[str]:
    driver, pool, address, opened, stream = there.kept.pop("import")
    with there.device.current():
        if address is not None:
            driver.cuMemFreeAsync(address, stream)
        driver.cuStreamSynchronize(stream)
        if opened is not None:
            driver.cuEventDestroy(opened)
        driver.cuMemPoolDestroy(pool)
        driver.cuStreamDestroy(stream)
    return [str(one) for one in driver.hazards]


class Shared:
    """A buffer that another process has open."""

    def __init__(self, bench: Bench, partner: Partner) -> None:
        self.buffer = of_shared_pool(bench)
        self.buffer.fill(1)
        bench.a.synchronize()
        fd, self.data = exported(bench, self.buffer)
        partner.run(_import, self.data, fds=[fd])


def test_the_exporter_frees_first(bench: Bench, partner: Partner) -> None:
    shared = Shared(bench, partner)
    shared.buffer.free()
    assert partner.run(_free) == []
    assert kinds(bench) == ["free before the importer's"]
    assert str(partner.pid) in bench.driver.hazards[0].what


def test_the_importer_frees_first(bench: Bench, partner: Partner) -> None:
    shared = Shared(bench, partner)
    assert partner.run(_free) == []
    shared.buffer.free()
    assert kinds(bench) == []


def _free_and_go_on(there: There, told: bool) -> bytes:
    """Free the import in stream order; ``told``: with an event behind it that the exporter can wait for."""
    driver, pool, address, _, stream = there.kept.pop("import")
    with there.device.current():
        driver.cuMemFreeAsync(address, stream)
        event = driver.cuEventCreate(_INTERPROCESS)[1]
        if told:
            driver.cuEventRecord(event, stream)
        there.keep("import", (driver, pool, None, event, stream))
        return opaque_bytes(driver.cuIpcGetEventHandle(event)[1])


@pytest.mark.parametrize("told", [False, True])
def test_the_importer_frees_first_and_has_work_left(bench: Bench, partner: Partner, told: bool) -> None:
    """That its free was called is not enough: the exporter has to come after it."""
    shared = Shared(bench, partner)
    handle = opaque_struct("CUipcEventHandle", partner.run(_free_and_go_on, told))
    event = bench.raw("cuIpcOpenEventHandle", handle)
    bench.raw("cuStreamWaitEvent", cuda.CUstream(bench.a.handle), event, 0)
    shared.buffer.free(bench.a)
    assert kinds(bench) == ([] if told else ["free before the importer's"])
    partner.run(_free)
    bench.raw("cuEventDestroy", event)


def test_an_importer_that_was_killed_has_nothing(bench: Bench, on_cuda: bool) -> None:
    with Partner(on_cuda) as partner:
        shared = Shared(bench, partner)
        assert interprocess.importers(shared.data) == [partner.pid]
        partner.kill()
        assert eventually(lambda: not interprocess.importers(shared.data))
        shared.buffer.free()
        assert kinds(bench) == []


def _answers(there: There) -> None:
    """That it was asked is all that is asked."""


def test_a_process_may_say_that_it_has_seen_what_it_was_told(bench: Bench, partner: Partner) -> None:
    """It waits for the word that says that memory is ready, and answers. The host knows then; no call shows that."""
    pool = shared_pool(bench)
    buffer, other = pool.allocate(SIZE, bench.a), pool.allocate(SIZE, bench.a)
    bench.a.synchronize()
    gate = bench.word()
    bench.raw("cuStreamWaitValue32", cuda.CUstream(bench.a.handle), gate, 1, 0)
    for one in (buffer, other):
        one.fill(1)
    shared = ipc.share(buffer)
    ctypes.c_uint32.from_address(gate).value = 1
    partner.run(_answers)
    buffer.fill(2, bench.b)
    assert kinds(bench) == []
    other.fill(2, bench.b)  # of this nobody was told
    assert kinds(bench) == ["race"]
    del shared
    bench.done(buffer, other)


def _open_checked(there: There, data: bytes) -> None:
    device = sa.Device(0, driver=sd.checked(there.driver))
    stream = there.keep("held", device.create_stream())
    there.keep("gate", Gate(device)).hold(stream)
    opened = ipc.open(data, there.came, stream=stream, driver=device._session.driver)
    opened.fill(2)
    opened.close()


def _let_go(there: There) -> list[str]:
    gate, stream = there.kept.pop("gate"), there.kept.pop("held")
    gate.close()
    stream.close()
    return [str(one) for one in stream._session.driver.hazards]


def test_the_free_waits_for_importers_that_have_closed(bench: Bench, partner: Partner) -> None:
    """The facade's free waits, in stream order, until the importer's own free has run."""
    buffer = of_shared_pool(bench)
    shared = ipc.share(buffer)
    partner.run(_open_checked, bytes(shared), fds=shared.fds)
    buffer.free()
    assert not bench.a.query()
    assert partner.run(_let_go) == []
    bench.a.synchronize()
    assert kinds(bench) == []


def test_a_dropped_driver_stops_no_thread(machine: Any) -> None:
    """Its control block ends after the host has synchronised with a device, because the end waits for all streams."""
    called = list[str]()

    class Noted(Wrapper):
        def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            called.append(name)
            return tuple(function(*args))

    def share() -> weakref.ref[Any]:
        driver = sd.checked(Noted(machine))
        device = sa.Device(0, driver=driver)
        with device.create_stream() as stream, sa.MemoryPool(device, handle_types=_POSIX) as pool:
            buffer = pool.allocate(SIZE, stream)
            ipc.share(buffer)
            buffer.free()
            stream.synchronize()
        return weakref.ref(driver)

    dropped, device = share(), sa.Device(0, driver=machine)
    with device.create_stream() as held, Gate(device) as gate:
        gate.hold(held)
        thread = threading.Thread(target=gc.collect, daemon=True)
        thread.start()
        thread.join(10)
        held.query()
        device.memory_info()
        assert not thread.is_alive() and dropped() is None and "cuMemHostUnregister" not in called
        gate.open()
        device.synchronize()
    assert "cuMemHostUnregister" in called


def test_a_process_that_has_ended_has_nothing() -> None:
    """Also before its parent has waited for it."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    assert processes.alive(ended.pid)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.alive(ended.pid)
    ended.wait()
    assert not processes.alive(ended.pid)


def test_a_process_that_is_exiting_has_nothing() -> None:
    """Its locks are released before its state changes (``PF_EXITING`` in proc(5))."""
    stat = Path("/proc/self/stat").read_bytes()
    fields = stat.split()
    assert processes.runs(stat)
    fields[8] = str(int(fields[8]) | 4).encode()
    assert not processes.runs(b" ".join(fields))


@pytest.mark.parametrize("end", ["free", "drop"])
def test_memory_whose_free_waits_for_importers_is_no_leak(checker: Any, device: sa.Device, end: str) -> None:
    with device.create_stream() as stream, sa.MemoryPool(device, handle_types=_POSIX) as pool:
        buffer: sa.Buffer | None = pool.allocate(SIZE, stream)
        held = ipc.share(buffer, hold=True)
        assert len(checker.leaks()) == 1
        if buffer is not None and end == "free":
            buffer.free()
        buffer = None
        assert checker.leaks() == [] and checker.outstanding()["pool allocation"]
        held.cancel()
        device.synchronize()
        assert "pool allocation" not in checker.outstanding()


# -- what an importer does not wait for --------------------------------------------------------------------------


def _step(there: There, offset: int, nbytes: int, waits: bool) -> list[str]:
    driver, _, address, opened, stream = there.kept["import"]
    with there.device.current():
        if waits:
            driver.cuStreamWaitEvent(stream, opened, 0)
        driver.used(int(address) + offset, nbytes, stream, False)
        driver.cuStreamSynchronize(stream)
    return [one.kind for one in driver.hazards]


@pytest.mark.parametrize(
    ("wait", "synchronised", "expected"),
    [(None, False, ["race"]), (0, False, ["race"]), (1, False, []), (None, True, [])],
    ids=["for nothing", "for an event of before", "for the event", "for nothing, as the exporter has"],
)
def test_an_importer_waits_for_the_exporter_s_event(
    bench: Bench, partner: Partner, wait: int | None, synchronised: bool, expected: list[str]
) -> None:
    buffer = of_shared_pool(bench)
    bench.a.synchronize()
    before, after = (bench.event(interprocess=True) for _ in range(2))
    bench.a.record(before)
    bench.write(buffer, bench.a)
    bench.a.record(after)
    fd, data = exported(bench, buffer)
    events = [event_handle(bench, one) for one in (before, after)]
    if synchronised:
        bench.a.synchronize()
    partner.run(_import, data, events[wait or 0], fds=[fd])
    assert partner.run(_step, 0, SIZE, wait is not None) == expected
    partner.run(_free)
    bench.done(buffer)
    assert kinds(bench) == []


def test_handles_once_and_an_event_a_step(bench: Bench, partner: Partner) -> None:
    """A step that does not wait for its own recording is found; one for other bytes need not wait, as the host has."""
    buffer = of_shared_pool(bench)
    bench.a.synchronize()
    event = bench.event(interprocess=True)
    fd, data = exported(bench, buffer)
    partner.run(_import, data, event_handle(bench, event), fds=[fd])
    half = SIZE // 2

    def write() -> None:
        bench.write(buffer[:half], bench.a)
        bench.a.record(event)

    for _ in range(3):
        write()
        assert partner.run(_step, 0, half, True) == []
    write()
    assert partner.run(_step, half, half, False) == []
    bench.a.synchronize()
    assert partner.run(_step, 0, half, False) == []
    write()
    assert partner.run(_step, half - 1, 1, False) == ["race"]
    partner.run(_free)
    bench.done(buffer)
    assert kinds(bench) == []


def _uses_opened(there: There, data: bytes, how: str) -> list[str]:
    """Open what was shared on one stream, and use it on another."""
    driver: Any = sd.checked(there.driver)
    device = sa.Device(0, driver=driver)
    with device.create_stream() as one, device.create_stream() as other:
        opened = ipc.open(data, there.came, stream=one, driver=driver)
        if how == "after it":
            other.wait(one)
        elif how == "after the host":
            one.synchronize()
        opened.used(one if how == "there" else other)
        other.wait(one)
        one.wait(other)
        opened.close()
        device.synchronize()
    return [hazard.kind for hazard in driver.hazards]


@pytest.mark.parametrize("kind", ["buffer", "growable"])
@pytest.mark.parametrize(
    ("how", "synchronised", "expected"),
    [
        ("elsewhere", False, ["race"]),
        ("there", False, []),
        ("after it", False, []),
        ("after the host", False, []),
        ("elsewhere", True, []),
    ],
)
def test_an_importer_uses_memory_after_the_stream_that_opened_it(
    bench: Bench, partner: Partner, kind: str, how: str, synchronised: bool, expected: list[str]
) -> None:
    memory: Any
    if kind == "buffer":
        memory = of_shared_pool(bench)
    else:
        memory = bench.keep(vmm.GrowableBuffer(bench.device, capacity=2 * PAGE, handle_types=_POSIX))
        memory.resize(PAGE)
    bench.write(memory, bench.a)
    shared = ipc.share(memory, stream=bench.a)
    if synchronised:
        bench.a.synchronize()
    assert partner.run(_uses_opened, bytes(shared), how, fds=[fd.fileno() for fd in shared.fds]) == expected
    del shared
    if kind == "buffer":
        bench.done(memory)
    assert kinds(bench) == []


def test_another_event_has_the_same_name() -> None:
    """As a real driver gives handles of events again: the numbers of a place on the board go on."""
    board = interprocess.Board()
    first = board.add_entry(b"name")
    assert first is not None
    board.record(first)
    board.drop_entry(first)
    places = [board.add_entry() for _ in range(interprocess.ENTRIES)]
    assert places[-1] == first and None not in places and board.add_entry() is None
    assert board.record(first) == 2
    board.close()


# -- the way back -------------------------------------------------------------------------------------------------


class _Word:
    """A value in memory of several processes, which streams write and wait for."""

    def __init__(self, driver: Any, fd: int) -> None:
        self.memory = mmap.mmap(fd, mmap.PAGESIZE)
        self.driver = driver
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        assert not driver.cuMemHostRegister(self.address, mmap.PAGESIZE, 0)[0]

    def close(self) -> None:
        assert not self.driver.cuMemHostUnregister(self.address)[0]


def _begins_turns(there: There, data: bytes, events: list[bytes]) -> None:
    """Import memory, an event of the exporter and one for the way back."""
    _import(there, data, events[0])
    driver = there.kept["import"][0]
    with there.device.current():
        back = driver.cuIpcOpenEventHandle(opaque_struct("CUipcEventHandle", events[1]))[1]
        there.keep("way back", (back, _Word(driver, there.came[1].fileno())))


def _turn(there: There, back: str) -> list[str]:
    """Wait for the exporter, read, and notify it by ``back``."""
    driver, _, address, written, stream = there.kept["import"]
    read, word = there.kept["way back"]
    with there.device.current():
        driver.cuStreamWaitEvent(stream, written, 0)
        if back == "too early":
            driver.cuEventRecord(read, stream)
        driver.used(int(address), SIZE, stream, False)
        if back == "event":
            driver.cuEventRecord(read, stream)
        elif back == "context":
            driver.cuCtxRecordEvent(driver.cuCtxGetCurrent()[1], read)
        elif back == "value":
            driver.cuStreamWriteValue32(stream, word.address, 1, 0)
        elif back == "host":
            driver.cuStreamSynchronize(stream)
    return [str(one) for one in driver.hazards]


def _ends_turns(there: There) -> None:
    driver, *_, stream = there.kept["import"]
    back, word = there.kept.pop("way back")
    with there.device.current():
        driver.cuStreamSynchronize(stream)
        driver.cuEventDestroy(back)
        word.close()
    _free(there)


class _Turns:
    """An allocation and two events, for an exporter and a process that takes turns with it."""

    def __init__(self, bench: Bench, partner: Partner) -> None:
        self.bench = bench
        self.buffer = of_shared_pool(bench)
        bench.a.synchronize()
        self.written, self.read = (bench.event(interprocess=True) for _ in range(2))
        self.fd, self.data = exported(bench, self.buffer)
        word = bench.keep(ipc.Fd(os.memfd_create("")))
        os.ftruncate(word.fileno(), mmap.PAGESIZE)
        with bench.device.current():
            self.word = _Word(bench.driver, word.fileno())
        self.events = [event_handle(bench, one) for one in (self.written, self.read)]
        partner.run(_begins_turns, self.data, self.events, fds=[self.fd, word.fileno()])
        bench.write(self.buffer, bench.a)
        bench.a.record(self.written)

    def end(self, partner: Partner) -> None:
        self.bench.a.synchronize()
        partner.run(_ends_turns)
        with self.bench.device.current():
            self.word.close()
        self.bench.done(self.buffer)


@pytest.mark.parametrize(
    ("back", "found"),
    [
        *((one, []) for one in ("event", "context", "value", "host")),
        *((one, ["race"]) for one in ("too early", "nothing")),
    ],
)
def test_an_exporter_waits_for_its_importer(bench: Bench, partner: Partner, back: str, found: list[str]) -> None:
    """Before it writes what the importer reads."""
    turns = _Turns(bench, partner)
    assert partner.run(_turn, back) == []
    if back == "value":
        bench.raw("cuStreamWaitValue32", cuda.CUstream(bench.a._raw), turns.word.address, 1, 0)
    elif back != "host":
        bench.a.wait(turns.read)
    bench.read(turns.buffer, bench.a)
    bench.write(turns.buffer, bench.a)
    turns.end(partner)
    assert kinds(bench) == found


def test_a_third_process_waits_for_the_second(bench: Bench, partner: Partner, on_cuda: bool) -> None:
    """What the second one had waited for is known to itself alone."""
    turns = _Turns(bench, partner)
    assert partner.run(_turn, "event") == []
    with Partner(on_cuda) as third:
        third.run(_import, turns.data, turns.events[1], fds=[turns.fd])
        assert third.run(_step, 0, SIZE, True) == []
        third.run(_free)
    turns.end(partner)
    assert kinds(bench) == []


def _opens_steps(there: There, data: bytes, event: bytes) -> None:
    driver: Any = sd.checked(there.driver)
    stream = sa.Device(0, driver=driver).create_stream()
    opened = ipc.open(data, there.came, stream=stream, driver=driver)
    there.keep("facade", (driver, stream, opened, ipc.open(event, driver=driver)))


def _facade_step(there: There, waits: bool) -> list[str]:
    driver, stream, opened, event = there.kept["facade"]
    if waits:
        stream.wait(event)
    opened.used(stream, write=False)
    stream.synchronize()
    return [one.kind for one in driver.hazards]


def _closes_steps(there: There) -> None:
    for one in reversed(there.kept.pop("facade")[1:]):
        one.close()


@pytest.mark.parametrize("waits", [True, False])
def test_steps_of_memory_that_the_facade_has_shared(bench: Bench, partner: Partner, waits: bool) -> None:
    """Its word says that the first contents are there, and no more."""
    buffer, event = of_shared_pool(bench), bench.event(interprocess=True)
    buffer.fill(1)
    shared = ipc.share(buffer)
    partner.run(_opens_steps, bytes(shared), bytes(ipc.share(event)), fds=[fd.fileno() for fd in shared.fds])
    for _ in range(2):
        bench.write(buffer, bench.a)
        bench.a.record(event)
        found = partner.run(_facade_step, waits)
    assert found == ([] if waits else ["race"])
    partner.run(_closes_steps)
    bench.done(buffer)
    assert kinds(bench) == []


def test_actors_of_events_that_are_gone_are_forgotten() -> None:
    """Those of events that are still there stay the same."""
    board: Any = {"name": [b"here"], "number": [1]}
    checked: Any = sd.checked(sd.simulated())
    found = checked.state.interprocess
    here = BoardEntry(board, 0, b"here", 1)
    actor = found._actor(here)
    for number in range(3 * _MOST_ACTORS):
        found._actor(BoardEntry(board, 0, b"gone %d" % number, 1))
    assert len(found._actors) <= 2 * _MOST_ACTORS and found._actor(here) is actor


@pytest.fixture
def pipes() -> Iterator[list[int]]:
    """The ends to read of two pipes, which the test closes."""
    both = [os.pipe() for _ in range(2)]
    yield [one for one, _ in both]
    for _, other in both:
        os.close(other)


def test_a_file_is_known_by_any_descriptor(pipes: list[int]) -> None:
    files: OpenFiles[str] = OpenFiles()
    one, other = pipes
    files.note(one, "one")
    assert files.find(other) is None
    with open(os.devnull) as null:  # which no epoll takes
        files.note(null.fileno(), "null")
        assert files.find(null.fileno()) is None
    again = os.dup(one)
    os.close(one)
    assert files.find(again) == "one"
    files.note(other, "other")
    assert (files.find(again), files.find(other)) == ("one", "other")
    os.close(again)
    os.close(other)
    files.close()


def test_a_number_goes_to_another_file(pipes: list[int]) -> None:
    """If the first file is closed, the number is the other file's; if somebody keeps it, the owner is unknown."""
    one, other = pipes
    for kept in (True, False):
        files: OpenFiles[str] = OpenFiles()
        first = os.dup(one)
        files.note(first, "one")
        os.dup2(other, first)
        if not kept:
            os.close(one)
        assert files.find(first) is None
        files.note(first, "another")
        assert files.find(first) == (None if kept else "another")
        assert not kept or files.find(one) is None
        os.close(first)
        files.close()
    os.close(other)


def test_it_keeps_nothing_open(pipes: list[int]) -> None:
    read, write = os.pipe()
    files: OpenFiles[str] = OpenFiles()
    files.note(read, "one")
    os.close(read)
    with pytest.raises(BrokenPipeError):
        os.write(write, b"x")
    os.close(write)
    files.close()
    for one in pipes:
        os.close(one)


def test_a_process_that_exports_all_the_time() -> None:
    """The files that were noted last are found; the table does not grow."""
    files: OpenFiles[int] = OpenFiles()
    kept: list[int] = []
    for number in range(300):
        kept.append(os.memfd_create("exported"))
        files.note(kept[-1], number)
    assert files.find(kept[-1]) == 299 and files.find(kept[0]) is None
    for one in kept:
        os.close(one)
