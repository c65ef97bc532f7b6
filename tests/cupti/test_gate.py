"""The gate: calls of threads without the GIL, and of all while somebody asks, reach the callback later."""

import contextlib
import ctypes
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from streamalloc.cupti import gate
from streamalloc.cupti.gate import _CODE, C_CALLBACK, Gate, _executable, machine_code

FUNCTIONS = {1: "cuEventQuery", 2: "cuEventRecord", 3: "cuEventCreate", 4: "cuLaunchKernel"}
QUERY, RECORD, CREATE, LAUNCH = FUNCTIONS
SIGNATURE = (None, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t)


class Gated:
    """A gate, with the calls that it let through."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.gate = Gate(self._called, FUNCTIONS)
        self._without, self._with = C_CALLBACK(self.gate.address), ctypes.PYFUNCTYPE(*SIGNATURE)(self.gate.address)

    def _called(self, user: int, domain: int, number: int, data: int) -> None:
        self.seen.append((number, struct.unpack_from("I", ctypes.string_at(data, 4))[0]))
        self.gate.left += bool(self.gate.modes[number])

    @contextlib.contextmanager
    def data(self, number: int, *args: int, site: int = 1, result: int = 0) -> Iterator[int]:
        words, answer = (ctypes.c_uint64 * 5)(*args), ctypes.c_uint32(result)
        data = struct.pack("I4xQQQQQ", site, 0, ctypes.addressof(words), ctypes.addressof(answer), 0, 77)
        kept = ctypes.create_string_buffer(data)
        yield ctypes.addressof(kept)

    def call(self, number: int, *args: int, with_lock: bool = False, site: int = 1, result: int = 0) -> None:
        with self.data(number, *args, site=site, result=result) as data:
            (self._with if with_lock else self._without)(self.gate.user, 1, number, data)

    def written(self) -> list[tuple[int, ...]]:
        return [(*one[:4], *struct.unpack_from("Q", one.args)) for one in self.gate.take()]


@pytest.fixture
def gated() -> Gated:
    made = Gated()
    if made.gate.address == made.gate.words[0]:
        pytest.skip("not on this processor")
    return made


def test_the_listing_has_the_instructions_of_its_bytes(tmp_path: Path) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    (tmp_path / "code").write_bytes(machine_code(_CODE))
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", "--insn-width=12"]
    shown = subprocess.run([*command, str(tmp_path / "code")], capture_output=True, text=True, check=True).stdout
    rows = [line.split("\t") for line in shown.partition("<.data>:")[2].strip().splitlines()]
    assert [(int(at.strip(" :"), 16), " ".join(text.split())) for at, _, text in rows] == [
        (int(line[:2], 16), line[31:].partition(";")[0].strip()) for line in _CODE.strip().splitlines()
    ]


def test_a_call_is_shown_once_after_it_has_returned(gated: Gated) -> None:
    for number in FUNCTIONS:
        gated.call(number, site=0)
        gated.call(number)
    assert gated.seen == [(number, 1) for number in FUNCTIONS] and gated.written() == []


def test_queries_without_pythons_lock_are_written_once_pytorch_is_there(gated: Gated) -> None:
    gated.gate.write_frees()
    gated.call(QUERY, 64, result=600)
    for number in (RECORD, LAUNCH):
        gated.call(number)
    gated.call(QUERY, with_lock=True)
    assert gated.seen == [(RECORD, 1), (LAUNCH, 1), (QUERY, 1)]
    assert gated.written() == [(QUERY, 600, threading.get_ident(), 77, 64)] and gated.written() == []


def test_what_libraries_call_with_a_lock_is_written_while_somebody_asks(gated: Gated) -> None:
    before = gated.gate.has_left_out
    with gated.gate.asking():
        for at, number in enumerate(FUNCTIONS):
            gated.call(number, at)
        # Arguments of the third point to what is gone later.
        assert (before, gated.gate.has_left_out) == (False, True)
    assert gated.seen == [(LAUNCH, 1)]
    assert [(one[0], one[-1]) for one in gated.written()] == [(QUERY, 0), (RECORD, 1)]
    gated.call(RECORD)
    assert gated.seen[1:] == [(RECORD, 1)]


def test_more_calls_than_there_is_room_for_are_shown(gated: Gated) -> None:
    gated.gate.write_frees()
    for number in range(5000):
        gated.call(QUERY, number)
    written = gated.written()
    assert [one[-1] for one in written] == list(range(len(written))) and len(written) + len(gated.seen) == 5000
    for number in range(5000):  # round the ring
        gated.call(QUERY, number)
        if number % 100 == 0:
            written = gated.written()
    assert written[-1][-1] == 4900


def test_calls_of_several_threads_are_all_written(gated: Gated) -> None:
    def work(first: int) -> None:
        together.wait()
        for number in range(first, first + 900):
            gated.call(QUERY, number)

    together = threading.Barrier(4)
    gated.gate.write_frees()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(1000 * at,)) for at in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(before)
    found = gated.written()
    assert sorted(one[-1] for one in found) == [1000 * at + n for at in range(4) for n in range(900)]
    assert len({one[2] for one in found}) == 4


# rbx = struct; struct.lock(struct.mutex); struct.gate(struct.user, 1, struct.number, struct.data); struct.unlock(...)
_LIBRARY = bytes.fromhex("534889fb488b3bff5308488b7b20be010000008b5328488b4b30ff5318488b3bff53105bc3")


def test_nobody_waits_with_a_lock_for_who_asks(gated: Gated) -> None:
    """A library calls the driver with a lock of its own, for which another thread waits with Python's."""
    libc, held, mutex = ctypes.CDLL(None), ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    locking = (libc.pthread_mutex_lock, libc.pthread_mutex_unlock)
    function = [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in locking]
    code = _executable(_LIBRARY)
    assert code is not None
    allocate = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    over: list[int] = []

    def work() -> None:
        while not over:
            with gated.data(RECORD) as data:
                words = ctypes.addressof(mutex), *function, gated.gate.address, gated.gate.user, RECORD, data
                allocate((ctypes.c_uint64 * 7)(*words))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(200):
            with gated.gate.asking():
                held.pthread_mutex_lock(mutex)
                held.usleep(100)
                held.pthread_mutex_unlock(mutex)
            gated.written()
            sleep(1e-4)
    finally:
        over.append(1)
        thread.join()
    assert len(gated.seen) > 0


def test_who_asks_waits_for_callbacks_that_have_begun(gated: Gated) -> None:
    order: list[str] = []
    begun = threading.Event()

    class Slow(list[Any]):
        def append(self, one: Any) -> None:
            begun.set()
            sleep(0.05)
            order.append("called")

    gated.seen = Slow()
    thread = threading.Thread(target=gated.call, args=(RECORD,))
    thread.start()
    assert begun.wait(5)
    with gated.gate.asking():
        order.append("asked")
    thread.join()
    assert order == ["called", "asked"]


@pytest.mark.parametrize("number", [QUERY, CREATE])
def test_a_call_while_the_counts_are_read_hides_no_callback(gated: Gated, number: int) -> None:
    """Another thread's call is written down, or left out, after the first count was read."""
    begun, goes_on, ended = threading.Event(), threading.Event(), []

    class Slow(list[Any]):
        def append(self, one: Any) -> None:
            begun.set()
            goes_on.wait(5)
            ended.append(one)

    class Words:
        calls = 3

        def __getitem__(self, at: int) -> int:
            found: int = words[at]
            if words[gate._ASKING] and self.calls:
                self.calls -= 1
                gated.call(number)
            elif not self.calls:
                goes_on.set()
            return found

        def __setitem__(self, at: int, value: int) -> None:
            words[at] = value

    gated.seen, words, gated.gate.words = Slow(), gated.gate.words, Words()
    thread = threading.Thread(target=gated.call, args=(RECORD,))
    thread.start()
    assert begun.wait(5)
    with gated.gate.asking():
        assert ended
    thread.join()


def test_each_call_is_shown_where_there_is_no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_executable", lambda code: None)
    plain = Gated()
    plain.gate.write_frees()
    with plain.gate.asking():
        for number in FUNCTIONS:
            plain.call(number)
    assert plain.seen == [(number, 1) for number in FUNCTIONS] and plain.written() == []


def test_a_callback_that_was_not_counted_is_waited_for_once(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_PATIENCE", 0.05)
    gated.call(RECORD)
    gated.gate.left -= 1
    begin = monotonic()
    with gated.gate.asking():
        assert monotonic() - begin >= 0.05 and gated.gate.left == 1


def test_an_interrupt_after_a_call_was_taken(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may be lost; the next one is taken."""

    def interrupted(*args: Any) -> None:
        pack_into(*args)
        monkeypatch.setattr(struct, "pack_into", pack_into)
        raise KeyboardInterrupt

    pack_into = struct.pack_into
    gated.gate.write_frees()
    for at in (1, 2):
        gated.call(QUERY, at)
    monkeypatch.setattr(struct, "pack_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gated.written()
    found: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: found.extend(gated.written()), daemon=True)
    thread.start()
    thread.join(5)
    assert [one[-1] for one in found] == [2]
