"""Traces and what they are read from: what is written comes back, and what is malformed is refused with its line."""

import contextlib
import gzip
import os
import pickle
import pickletools
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import traces
from streamalloc.traces import Event, Trace, TraceFormatError
from streamalloc.traces.trace import plain
from tests.support import each_raises, in_threads, soon

HEADER = '{"format": "streamalloc trace", "version": 1, "source": "by hand", "skipped": {"failed allocations": 2}}'
PLAIN = "plain pickle|damaged"
WITHOUT_TRACES: list[Any] = [{}, [], 3, {"device_traces": {}}, {"device_traces": [3]}]
TWO = Trace(
    (
        Event("allocate", 0, 4096, 0, 0, 0),
        Event("allocate", 7, 100, 1, 0, 10),
        Event("free", 0, 4096, 1, 2, 25),
        Event("free", 7, 100, 1, 0, 1_000_000_030),
    ),
    "by hand",
    {"failed allocations": 2},
)


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


class TestTrace:
    def test_what_it_says_of_itself(self) -> None:
        assert (TWO.allocations, TWO.streams, TWO.threads, TWO.peak) == (2, 2, 2, 4196)
        assert TWO.seconds == 1.00000003
        assert repr(TWO) == "<Trace of 4 events on 2 streams, at most 4,196 bytes at once>"
        assert "of 1 event on 1 stream, at most" in repr(Trace(TWO.events[:1]))
        backwards = Trace((TWO.events[0]._replace(time=500), TWO.events[2]._replace(time=100)))
        assert backwards.seconds == 4e-07  # lines of several threads may be out of order
        empty = Trace(())
        assert (empty.allocations, empty.streams, empty.threads, empty.peak, empty.seconds) == (0, 0, 0, 0, 0.0)

    @pytest.mark.parametrize(
        ("event", "why"),
        [
            (Event("free", 3, 1, 0, 0, 0), "allocation 3 is unknown"),
            (Event("free", 0, 4096, 0, 0, 0), "allocation 0 was freed before"),
            (Event("allocate", 0, 1, 0, 0, 0), "allocation 0 was made before"),
            (Event("allocate", 9, -1, 0, 0, 0), r"nbytes=-1: it has to be an integer from 0 to 2\*\*63 - 1"),
            (Event("allocate", 9, 1 << 63, 0, 0, 0), "nbytes=9223372036854775808"),
            (Event("allocate", 9, True, 0, 0, 0), "nbytes=True"),
            (Event("allocate", 9, 1, 0.0, 0, 0), "stream=0.0"),  # type: ignore[arg-type]
            (Event("grow", 9, 1, 0, 0, 0), "action 'grow': allowed are 'allocate' and 'free'"),  # type: ignore[arg-type]
        ],
    )
    def test_events_of_no_run(self, event: Event, why: str) -> None:
        with pytest.raises(ValueError, match=f"^event 4: {why}"):
            Trace((*TWO.events, event))

    def test_events_of_any_iterable(self) -> None:
        for events in (iter(TWO.events), list(TWO.events)):
            assert Trace(events, TWO.source, TWO.skipped) == TWO  # type: ignore[arg-type]

    def test_a_free_has_the_size_of_its_allocation(self) -> None:
        with pytest.raises(ValueError, match="event 1: a free of 2 bytes, but allocation 5 has 1"):
            Trace((Event("allocate", 5, 1, 0, 0, 0), Event("free", 5, 2, 0, 0, 0)))


class TestFile:
    def test_equal_traces_make_equal_files(self, tmp_path: Path) -> None:
        one, two = (Trace((), "", dict(pairs)) for pairs in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)]))
        for number, trace in enumerate((one, two)):
            trace.save(tmp_path / str(number))
        assert one == two and (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()

    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
    def test_round_trip(self, tmp_path: Path, name: str) -> None:
        TWO.save(tmp_path / name)
        assert traces.load(tmp_path / name) == TWO
        assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith(".gz") else b'{"')

    @pytest.mark.parametrize(
        ("header", "event"),
        [(HEADER, '["allocate", 0, 8, 0, 0, 0]'), ("Thread,Time,Action,Pointer,Size,Stream", "1,1.0,allocate,0x1,8,0")],
    )
    def test_what_editors_add_is_ignored(self, tmp_path: Path, header: str, event: str) -> None:
        for text in (f"{header}\n{event}\n\n", f"\ufeff{header}\r\n\r\n{event}\r\n"):
            (tmp_path / "trace").write_bytes(text.encode())
            assert traces.load(tmp_path / "trace").allocations == 1
        (tmp_path / "trace").write_text(f"{header}\n\n{event}\nnone\n")
        with pytest.raises(TraceFormatError, match="trace, line 4: "):
            traces.load(tmp_path / "trace")

    @pytest.mark.parametrize("name", list(traces.WORKLOADS))
    def test_made_up_ones_round_trip_and_are_always_the_same(self, tmp_path: Path, name: str) -> None:
        trace = traces.WORKLOADS[name]()
        trace.save(tmp_path / "one.gz")
        assert traces.load(tmp_path / "one.gz") == trace == traces.WORKLOADS[name]()
        assert traces.WORKLOADS[name](seed=1) != trace

    def test_as_it_is_documented(self, tmp_path: Path) -> None:
        path = written(tmp_path / "trace", HEADER, '["allocate", 0, 8, 0, 0, 5]', ' [ "free",0,8,3,1,6 ]')
        trace = traces.load(path)
        assert trace.events == (Event("allocate", 0, 8, 0, 0, 5), Event("free", 0, 8, 3, 1, 6))
        assert (trace.source, trace.skipped) == ("by hand", {"failed allocations": 2})

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ('["allocate", 1, 8, 0, 0]', "an event is a list of action, id, nbytes, stream, thread, time"),
            ('{"action": "allocate"}', "an event is a list of"),
            ('["allocate", 1, 8, 0, 0, 0', "Expecting ',' delimiter"),
            ('["allocate", 1, 8.0, 0, 0, 0]', "nbytes=8.0"),
            ('["allocate", 1, "8", 0, 0, 0]', "nbytes='8'"),
            ('["allocate", [1], 8, 0, 0, 0]', r"id=\[1\]"),
            ('["free", 4, 8, 0, 0, 0]', "allocation 4 is unknown"),
            ('["allocate", 0, 8, 0, 0, 0]', "allocation 0 was made before"),
            ("[" * 100_000, "recursion|overflow"),
            ("[" + "9" * 5000 + "]", "an event is a list of|digits"),
        ],
    )
    def test_malformed_line(self, tmp_path: Path, line: str, why: str) -> None:
        path = written(tmp_path / "trace", HEADER, '["allocate", 0, 8, 0, 0, 5]', line)
        with pytest.raises(TraceFormatError, match=f"trace, line 3: .*({why})") as caught:
            traces.load(path)
        assert caught.value.line == 3

    @pytest.mark.parametrize(
        ("header", "why"),
        [
            (HEADER.replace("1", "2", 1), "version 2: only version 1 is known here"),
            (HEADER.replace("streamalloc", "other"), "this is no trace"),
            ("{", "this is no trace"),
            (HEADER.replace('"by hand"', "3"), "'source' has to be text"),
            (HEADER.replace(": 2}", ": -2}"), "'skipped' an object of numbers"),
        ],
    )
    def test_malformed_header(self, tmp_path: Path, header: str, why: str) -> None:
        with pytest.raises(TraceFormatError, match=f"line 1: .*{why}"):
            traces.load(written(tmp_path / "trace", header))

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            *((content, "neither a streamalloc trace") for content in (b"", b"hello\n", b"\x00\x01")),
            (HEADER.encode() + b"\n\xff\xfe\n", "line 2: this is no text"),
            *((pickle.dumps(one), "no 'device_traces'") for one in WITHOUT_TRACES),
            (b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.", PLAIN),
            (b"\x80\x02(X\x01\x00\x00\x001ibuiltins\neval\n.", PLAIN),
            (b"\x80\x02X\x01\x00\x00\x001Q.", PLAIN),
            (b"\x80\x02\x82\x01.", PLAIN),
            (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", PLAIN),
            (b"\x80\x02", PLAIN),
            (b"\x80\x02}q\x00", PLAIN),
            (b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x7f", PLAIN),
            (b"\x80\x09}.", PLAIN),
        ],
    )
    def test_other_file(self, tmp_path: Path, content: bytes, why: str) -> None:
        """Also pickles that do something, or are damaged."""
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(TraceFormatError, match=why):
            traces.load(tmp_path / "file")

    @pytest.mark.parametrize("packed", [bytes, gzip.compress])
    def test_pipe(self, tmp_path: Path, packed: Any) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        data = packed((HEADER + '\n["allocate", 0, 8, 0, 0, 5]\n').encode())
        with soon(lambda: pipe.write_bytes(data), 0):
            assert traces.load(pipe).allocations == 1

    @pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:40] + b"\xff" * 8 + data[48:]])
    def test_damaged_compression(self, tmp_path: Path, damage: Any) -> None:
        (tmp_path / "file").write_bytes(damage(gzip.compress((HEADER + "\nnone of this\n").encode())))
        with pytest.raises(TraceFormatError, match=r"damaged|no text|Expecting|Extra data|no trace"):
            traces.load(tmp_path / "file")


RMM = "Thread,Time,Action,Pointer,Size,Stream"


class TestRmm:
    def test_log(self, tmp_path: Path) -> None:
        path = written(
            tmp_path / "log.csv",
            RMM,
            "13768,23:59:59:999999,allocate,0x7f0000000000,1048576,0x0",
            "13769,00:00:00:000001,allocate,0x7f0000100000,512,0x5500",
            "13769,00:00:00:000002,allocate failure,(nil),99999999999,0x5500",
            "13768,00:00:00:000003,free,0x7F0000000000,1048576,0x5500",
            "13768,00:00:00:000004,free,0x7f0000999000,1024,0x5500",
            "13768,00:00:00:000005,allocate,0x7f0000000000,64,0x0",
        )
        trace = traces.load(path)
        assert trace == traces.load(path)
        assert trace.events == (
            Event("allocate", 0, 1048576, 0, 0, 0),
            Event("allocate", 1, 512, 1, 1, 2_000),
            Event("free", 0, 1048576, 1, 0, 4_000),
            Event("allocate", 2, 64, 0, 0, 6_000),
        )
        assert trace.skipped == {"failed allocations": 1, "frees of memory that was allocated before": 1}

    @pytest.mark.parametrize("clock", ["00:00:01.5", "1.5"])
    def test_other_spellings(self, tmp_path: Path, clock: str) -> None:
        first = clock.replace("1.5", "1")
        first = first if ":" not in first else first + ".0"
        path = written(tmp_path / "log", RMM, f"1,{first},allocate,0x1,8,0", f"1,{clock},deallocate,0x1,8,0")
        assert traces.load(path).events[1].time == 500_000_000

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("1,00:00:00:0,allocate,0x1,8", "5 fields, not 6"),
            ("1,yesterday,allocate,0x1,8,0", "time 'yesterday' is neither"),
            ("1,00:00:00:0,grow,0x1,8,0", "action 'grow'"),
            ("1,00:00:00:0,allocate,0x1,-8,0", "size '-8' is no number"),
            ("1,00:00:00:0,allocate,0x1,٣,0", "size '٣' is no number"),
            ("1,00:00:00:0,free,0x1,many,0", "size 'many' is no number"),
            ("1,00:00:00:0,allocate,0x1,9223372036854775808,0", "nbytes=9223372036854775808: it has to be"),
            ("1,00:00:00:0,allocate,0xa,8,0", "memory at 0xa is allocated again before it was freed"),
        ],
    )
    def test_malformed(self, tmp_path: Path, line: str, why: str) -> None:
        path = written(tmp_path / "log", RMM, "1,00:00:00:0,allocate,0xA,8,0", line)
        with pytest.raises(TraceFormatError, match=f"line 3: {why}"):
            traces.load(path)

    def test_other_columns(self, tmp_path: Path) -> None:
        with pytest.raises(TraceFormatError, match="line 1: the first line has to begin with Thread,Time"):
            traces.load(written(tmp_path / "log", "Thread,Time,Action"))


def entry(action: str, addr: int, size: int, time_us: int, stream: int = 0) -> dict[str, Any]:
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": time_us, "frames": frames}


SNAPSHOT: dict[str, Any] = {
    "segments": [],
    "device_traces": [
        [],
        [
            entry("segment_alloc", 0x1000, 2 << 20, 999),
            entry("free_requested", 0x9000, 8, 999),
            entry("free_completed", 0x9000, 8, 999),
            entry("alloc", 0x1000, 512, 1000),
            entry("alloc", 0x1200, 1024, 1002, 77),
            entry("free_requested", 0x1000, 512, 1003),
            entry("free_completed", 0x1000, 512, 1004),
            {"action": "oom", "size": 1 << 40, "stream": 0, "device_free": 5, "time_us": 1004},
            entry("alloc", 0x1000, 256, 1005),
            entry("free_completed", 0x1200, 1024, 1006, 77),
            entry("snapshot", 0, 0, 1007),
        ],
    ],
    "allocator_settings": {"expandable_segments": False, "garbage_collection_threshold": 0.0},
}


class Evil:
    """Runs a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


class TestPyTorch:
    def expect(self, trace: Trace) -> None:
        assert trace.events == (
            Event("allocate", 0, 512, 0, 0, 0),
            Event("allocate", 1, 1024, 1, 0, 2_000),
            Event("free", 0, 512, 0, 0, 3_000),
            Event("allocate", 2, 256, 0, 0, 5_000),
            Event("free", 1, 1024, 1, 0, 6_000),
        )
        assert trace.skipped == {"failed allocations": 1, "frees of memory that was allocated before": 1}

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_file(self, tmp_path: Path, protocol: int) -> None:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(pickle.dumps(SNAPSHOT, protocol))
        self.expect(traces.load(path))
        self.expect(traces.load(path, device=1))

    def test_object(self) -> None:
        self.expect(traces.load(SNAPSHOT))

    @pytest.mark.parametrize(
        "thing",
        [
            Evil(),
            {**SNAPSHOT, "segments": [Evil()]},
            {**SNAPSHOT, "segments": Path("/")},
            {**SNAPSHOT, "segments": threading.Thread},
            {**SNAPSHOT, "segments": print},
            {**SNAPSHOT, "segments": 1j},
        ],
    )
    def test_only_plain_data_is_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thing: Any) -> None:
        monkeypatch.chdir(tmp_path)
        Path("snapshot").write_bytes(pickle.dumps(thing))
        with pytest.raises(TraceFormatError, match="no plain pickle: UnpicklingError: it names "):
            traces.load("snapshot")
        assert not Path("evil").exists()

    @pytest.mark.parametrize(
        ("bad", "why"),
        [
            ([], "it is no dictionary"),
            ({}, "'action' has to be of type str, not NoneType"),
            ({"action": b"alloc"}, "'action' has to be of type str, not bytes"),
            ({**entry("alloc", 1, 2, 3), "size": 2.0}, "'size' has to be of type int, not float"),
            ({**entry("alloc", 1, 2, 3), "addr": True}, "'addr' has to be of type int, not bool"),
            (entry("alloc", 1, -1, 3), "nbytes=-1: it has to be an integer from 0"),
            (entry("alloc", 1, 1 << 63, 3), "nbytes=9223372036854775808: it has to be an integer from 0"),
            (entry("alloc", 1, 1, 3) | {"time_us": 1 << 63}, "time=92233720368547758"),
            (entry("alloc", 0x1000, 2, 3), "memory at 0x1000 is allocated again before it was freed"),
        ],
    )
    def test_malformed_entry(self, bad: Any, why: str) -> None:
        with pytest.raises(TraceFormatError, match=f"entry 2 of device 0: {why}") as caught:
            traces.load({"device_traces": [[entry("alloc", 0x1000, 1, 0), bad]]})
        assert caught.value.line == 2

    def test_which_device(self) -> None:
        several = {"device_traces": [SNAPSHOT["device_traces"][1]] * 2}
        with pytest.raises(ValueError, match=r"^devices 0, 1 have a history: .* device=0$"):
            traces.load(several)
        self.expect(traces.load(several, device=0))
        with pytest.raises(ValueError, match="device=2: the snapshot has no history of it"):
            traces.load(several, device=2)
        each_raises(ValueError, lambda: traces.load({"device_traces": [[]]}), match="^the snapshot has no history")

    @pytest.mark.parametrize(("histories", "why"), [(0, "the snapshot has no history"), (2, "devices 0, 1 have")])
    def test_the_error_names_the_file(self, tmp_path: Path, histories: int, why: str) -> None:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(pickle.dumps({"device_traces": [SNAPSHOT["device_traces"][1]] * histories}))
        with pytest.raises(ValueError, match=f"^{path}: {why}"):
            traces.load(path)


class TestCalls:
    def test_what_a_program_did(self, traced: Any, device: sa.Device) -> None:
        with sa.MemoryPool(device) as pool, device.create_stream() as one, device.create_stream() as two:
            before = pool.allocate(64, one)
            traced.calls.clear()
            first = pool.allocate(4096, one)
            second = sa.allocate(100, two)
            pool.allocate(0, one).free()
            first.free(two)
            in_threads(second.free)
            before.free()
            with pytest.raises(sa.OutOfMemoryError):
                pool.allocate(1 << 50, one)
            trace = traces.from_calls(traced.calls)
            two.synchronize()
        shown = [event[:5] for event in trace.events]
        assert [one for one in shown if one[2]] == [
            ("allocate", 0, 4096, 0, 0),
            ("allocate", 1, 100, 1, 0),
            ("free", 0, 4096, 1, 0),
            ("free", 1, 100, 1, 1),
        ]
        times = [event.time for event in trace.events]
        assert times[0] == 0
        assert times == sorted(times)
        assert trace.skipped["frees of memory that was allocated before"] == 1
        assert trace.skipped["failed allocations"] >= 1
        assert (trace.streams, trace.threads) == (2, 2)
        assert Trace(trace.events, trace.source, trace.skipped) == trace

    def test_both_handles_of_the_legacy_stream(self) -> None:
        calls = [sd.Call("cuMemAllocAsync", (8, handle), (0, 0x1000 + handle)) for handle in (0, 1, 2)]
        assert traces.from_calls(calls).streams == 2

    def test_free_that_nobody_saw(self) -> None:
        def call(name: str, *args: Any, answer: tuple[Any, ...] = ()) -> sd.Call:
            return sd.Call(name, args, (0, *answer))

        trace = traces.from_calls(
            [
                call("cuMemAlloc", 8, answer=(0x1000,)),
                call("cuMemAllocFromPoolAsync", 16, "pool", None, answer=(0x1000,)),
                call("cuMemFree", 0x1000),
                call("cuMemFree", 0),
            ]
        )
        assert [event[:3] for event in trace.events] == [
            ("allocate", 0, 8),
            ("free", 0, 8),
            ("allocate", 1, 16),
            ("free", 1, 16),
        ]
        assert trace.skipped == {"frees that were not recorded": 1}


def _peak(path: Path) -> int:
    """Peak of Python's memory in bytes while it read a file."""
    tracemalloc.start()
    try:
        with contextlib.suppress(TraceFormatError):
            traces.load(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _said(opcode: bytes, size: int, count: int) -> bytes:
    return b"\x80\x04" + opcode + size.to_bytes(count, "little") + b"ab."


SAYS_MUCH = {
    "a memo number": b"\x80\x04K\x01r" + (1 << 25).to_bytes(4, "little") + b".",
    "a memo number as text": b"\x80\x04K\x01p33554432\n.",
    "a length of text": _said(b"X", 1 << 28, 4),
    "a long length of text": _said(b"\x8d", 1 << 28, 8),
    "a length of bytes": _said(b"B", 1 << 28, 4),
    "a long length of bytes": _said(b"\x8e", 1 << 28, 8),
    "a length of an array of bytes": _said(b"\x96", 1 << 28, 8),
    "a length of a number": _said(b"\x8b", 1 << 28, 4),
    "a length of a frame": _said(b"\x95", 1 << 28, 8),
}
LONG = 1 << 26
COMPRESSED = {
    "a pickle": (b"\x80\x04B" + LONG.to_bytes(4, "little"), b"\0", b"."),
    "a line of RMM's log": (b"Thread,Time,Action,Pointer,Size,Stream\n", b"1", b""),
    "a line of a trace": (b"{", b" ", b""),
    "a header of RMM's log": (b"", b"T", b""),
    "lists in lists": (b'{"format": "streamalloc trace", "version": 1}\n', b"[", b""),
}
"""The begin of a file, the byte that follows 64 Mi times, and the end."""


@pytest.mark.parametrize("said", [*SAYS_MUCH.values(), *COMPRESSED.values()], ids=[*SAYS_MUCH, *COMPRESSED])
def test_no_more_memory_than_the_file_is_long(tmp_path: Path, said: bytes | tuple[bytes, bytes, bytes]) -> None:
    path = tmp_path / "file"
    if isinstance(said, tuple):
        begin, byte, end = said
        said = gzip.compress(begin + byte * LONG + end)
    path.write_bytes(said)
    assert _peak(path) < (24 << 20)
    with pytest.raises(TraceFormatError):
        traces.load(path)


def test_keys_that_take_for_ever_to_hash(tmp_path: Path) -> None:
    nested = b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (number, number) for number in range(64))
    (tmp_path / "file").write_bytes(nested + b"}h\x40K\x01s.")
    with pytest.raises(TraceFormatError, match="a key is of type tuple"):
        traces.load(tmp_path / "file")


def test_the_opcodes_that_plain_data_has() -> None:
    """Any other one is refused, those of later protocols too."""
    refused = set()
    for opcode in pickletools.opcodes:
        try:
            plain(opcode.code.encode("latin-1") + b"0\n0\n.")
        except pickle.UnpicklingError as error:
            refused |= {opcode.name} if "names more than plain data" in str(error) else set()
        except Exception:  # it needs something on the stack
            pass
    assert {
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "BUILD",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "EXT1",
        "PERSID",
    } <= refused
    assert {"BINPERSID", "NEXT_BUFFER", "FROZENSET", "EMPTY_SET", "ADDITEMS"} <= refused


def test_late_lines_of_the_day_before(tmp_path: Path) -> None:
    """Lines of several threads are slightly out of order, also at midnight."""
    clocks = (
        "23:59:58:000000", "00:00:00:500000", "23:59:59:500000", "00:00:01:000000", "23:59:58:000000", "00:00:03:0",
    )  # fmt: skip
    lines = [f"1,{clock},allocate,{hex(number + 1)},5,0" for number, clock in enumerate(clocks)]
    trace = traces.load(written(tmp_path / "log.csv", "Thread,Time,Action,Pointer,Size,Stream", *lines))
    assert [event.time / 1e9 for event in trace.events] == [0.0, 2.5, 1.5, 3.0, 0.0, 5.0]
