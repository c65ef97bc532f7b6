"""Two uses of the same memory; host functions and words."""

from types import SimpleNamespace
from typing import Any

import streamalloc as sa
from tests.checker.corpus.bench import ACTS, THINGS, Bench, programs


def _array(b: Bench, memory: sa.Memory, stream: sa.Stream | None = None) -> Any:
    """Memory as another library shows it."""
    made = {"version": 3, "shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.address, False)}
    return SimpleNamespace(__cuda_array_interface__=made | {"stream": stream and stream.handle})


def _on_its_own_stream(b: Bench, memory: sa.Memory, waits: int) -> None:
    """The work of a thread on its per-thread default stream, which it waits for or not."""
    memory.fill(1, b.device.per_thread_stream)
    b.wait(b.device.per_thread_stream, bool(waits))


THINGS["array"] = _array
THINGS["work"] = _on_its_own_stream
# Without a stream: the library has asked for no order.
ACTS["dlpack"] = lambda memory, stream=None: memory.__dlpack__(stream=stream.handle if stream else -1)
programs(
    """
race
    another_event_has_the_handle_of_a_deleted_one: x = ready; read x a; e = event; record a e; - close e; - e = event;
        wait b e; write x b
    a_host_function_tells_too_early: x = ready; + write x b; t = told_by b; - write x b; wait t; write x c
    a_host_function_holds_a_stream: x = ready; f = holding b; write x b; write x c; + synchronize c; set f;
        synchronize b
    dlpack_was_asked_for_another_stream: x = ready; l = legacy; write x a; __dlpack__ x; read x l|b
    parts_that_overlap_by_a_byte: x = new a; a > b; write x[:2048] a; write x[2048:]|x[2047:] b
    read_back_before_it_is_there: w = word; x = new a 64; fill x 3; cuMemcpyAsync w x 64 a; e = event; record a e;
        + synchronize e; host_reads w 64
    a_new_stream_knows_what_the_host_knows: x = ready; write x a; s = stream; + synchronize a; write x s
    an_event_was_recorded_between_two_uses: w = word; x = new a 64; e = timing; f = timing; record a e;
        + cuMemcpyHtoDAsync x w 64 a; record a f; - cuMemcpyHtoDAsync x w 64 a; synchronize f; cuEventElapsedTime e f;
        host_writes w 64
    a_copy_of_the_legacy_stream_waits_for_blocking_streams_only: x = ready; s = blocking; h = pageable; fill x 1 s|a;
        cuMemcpyDtoH h x 4096
    who_waits_for_a_word_was_queued_first: w = flag; x = ready; until b w 1; write x b; + write x a; put a w 1;
        - write x a
    an_earlier_value_satisfies_the_wait: w = flag; x = ready; put a w 1; write x a; put a w 2; until b w 2|1; write x b
    a_value_that_was_there_before_another: w = flag; x = ready; put a w 1; put a w 2; until b w 1 1; + write x c;
        put c w 1; - write x c; write x b
    a_word_is_set_by_a_fill: w = flag; x = ready; + fill x 1 a; cuMemsetD32Async w 1 1 a; - fill x 1 a; until b w 1;
        fill x 2 b
    work_of_another_thread: x = ready; elsewhere write x b; + elsewhere synchronize b; write x c
    per_thread_streams_of_two_threads: x = ready; s = per_thread; elsewhere work x 1|0; write x s
    threads_one_after_the_other_have_streams_of_their_own: x = ready; elsewhere work x 1|0; elsewhere work x 1|0
    dlpack_was_asked_for_no_order: x = ready; write x a; + dlpack x b; - dlpack x; read x b
    a_consumer_of_dlpack_still_reads: x = ready; dlpack x b; + b > a; write x a
    an_array_without_a_stream_has_to_be_ready: x = ready; y = ready; write x a; + z = array x a; - z = array x;
        copy_from y z b
    an_array_of_the_wrong_stream: x = ready; y = ready; l = legacy; write y l|c; z = array y l; copy_to x z b
    the_word_of_one_of_two_writers: w = word; x = ready; y = ready; fill x 1 a; put a w 1; fill y 1 b; put b w+4 1;
        until c w 1 2; + until c w+4 1 2; fill x 2 c; fill y 2 c
free racing a use
    freed_elsewhere_while_a_gate_holds_the_use: x = new b; synchronize b; w = word; until a w 1; write x a; + a > b;
        free x b; open w; synchronize device
unmap while in use
    unmapped_while_a_host_function_holds_the_use: m = mapped; f = holding a; at m a; + set f; + synchronize a; unmap m;
        set f; synchronize device
"""
)
programs(
    """
race
    pinned_memory_is_written_while_it_is_copied: w = word; x = new a 64; cuMemcpyAsync x w 64 a; + synchronize a;
        host_writes w 64
""",
    simulated="the real driver may make a blocking copy here",
)
programs(
    """
race
    the_legacy_streams_of_two_devices: p = peer; allow p 3; x = ready; l = legacy; m = legacy p; fill x 1 l; + l > m;
        write x m; synchronize p
""",
    gpus=2,
)
