"""What whole programs do wrong: loaders, double buffers, rings, replayed graphs, workers and peers."""

from tests.checker.corpus.bench import programs

programs(
    """
race
    three_slots_for_two_buffers: x = ready; y = ready; d = event; e = event; f = event; write x a; a > b; read x b;
        record b d; write y a; a > b; read y b; record b e; wait a d|f; write x a
    a_ring_wraps_around_before_the_reader: x = ready; y = ready; z = ready; d = event; write x a; a > b; read x b;
        record b d; write y a; write z a; + wait a d; write x a
    a_batch_is_changed_after_the_host_function_of_another_stream: p = pinned; x = ready; cuMemcpyHtoDAsync x p 4096 a;
        call a|b; synchronize a|b; host_writes p
    a_loader_waits_for_the_other_slot: p = pinned; x = ready; e = event; f = event; record c f;
        cuMemcpyHtoDAsync x p 4096 a; record a e; synchronize e|f; poke p
    computed_before_the_batch_is_there: p = pinned; x = ready; cuMemcpyHtoDAsync x p 4096 a; + a > b; read x b
    the_next_batch_overwrites_the_one_in_use: p = pinned; x = ready; cuMemcpyHtoDAsync x p 4096 a; a > b; read x b;
        + b > a; cuMemcpyHtoDAsync x p 4096 a; a > b; read x b
    the_results_are_read_after_the_wrong_stream: p = pinned; x = ready; fill x 1 a; a > b; cuMemcpyDtoHAsync p x 4096 b;
        synchronize b|a; host_reads p
    a_pinned_target_of_a_copy_that_pageable_memory_would_wait_for: p = pinned; h = pageable; x = ready;
        cuMemcpyDtoHAsync h|p x 4096 a; host_reads h|p
    an_array_is_registered_and_read_at_once: h = pageable; x = ready; cuMemHostRegister h 4096 0;
        cuMemcpyDtoHAsync h x 4096 a; + synchronize a; host_reads h; synchronize device; cuMemHostUnregister h
    an_event_is_recorded_early: x = ready; e = event; - record a e; write x a; + record a e; wait b e; write x b
    an_event_is_recorded_on_the_stream_that_waits: x = ready; e = event; write x a; record a|b e; wait b e; write x b
    an_event_is_not_recorded: x = ready; e = event; write x a; + record a e; wait b e; write x b
    an_event_is_recorded_anew_on_a_third_stream: x = ready; e = event; write x a; record a e; record a|c e; wait b e;
        write x b
    a_stream_waits_before_the_recording: x = ready; e = event; - wait b e; write x a; record a e; + wait b e; read x b
    one_of_two_parts_is_waited_for: x = ready; write x[:1024] a; write x[1024:2048] b; a > c; + b > c; read x[:2048] c
    the_way_back_is_not_ordered: x = ready; write x a; a > b; read x b; + b > a; fill x 0 a
    joined_before_the_second_kernel: x = ready; a > b; write x[:64] b; - b > a; write x[64:128] b; + b > a; read x a
    a_fill_on_the_legacy_stream_beside_a_non_blocking_one: x = ready; cuMemsetD8Async x 0 4096 0; s = blocking|stream;
        write x s
    a_synchronous_fill_returns_early: x = ready; cuMemsetD32 x 0 1024; + cuStreamSynchronize 0; write x a
    the_per_thread_stream_is_not_the_legacy_one: x = ready; s = per_thread; cuMemsetD8Async x 0 4096 2;
        cuMemsetD8Async x 1 4096 1; write x s|a
    a_legacy_copy_reads_what_a_non_blocking_stream_writes: x = ready; y = ready; s = blocking|stream; write x s;
        cuMemcpyDtoD y x 4096
    a_reader_waits_for_one_message_too_few: x = ready; y = ready; w = word; write x a; put a w 1; write y a; put a w 2;
        until b w 2|1; read y b
    a_flag_is_written_before_the_message: x = ready; w = word; + write x a; put a w 1; - write x a; until b w 1;
        read x b
    two_graphs_share_a_workspace: x = ready; begin a; fill x 1 a; g = end; begin a; fill x 1 a; h = end; launch g a;
        + a > b; launch h b
    the_input_of_a_graph_is_replaced_while_it_runs: x = ready; y = ready; p = pinned; begin a; copy_to x y a; g = end;
        cuMemcpyHtoDAsync x p 4096 b; b > a; launch g a; + a > b; cuMemcpyHtoDAsync x p 4096 b; b > a; launch g a
    a_graph_copies_into_what_the_host_reads: p = pinned; x = ready; begin a; cuMemcpyDtoHAsync p x 4096 a; g = end;
        launch g a; + synchronize a; host_reads p
    an_alias_is_written_while_the_page_is_read: m = mapped 2; n = second m; look m a; + a > b; at n b
    columns_that_are_one_byte_too_wide: x = ready; cuMemsetD2D8Async x 64 1 32|33 8 a;
        cuMemsetD2D8Async x+32 64 1 32 8 b
free racing a use
    a_batch_is_freed_on_the_stream_that_loaded_it: x = new a; fill x 1 a; a > b; read x b; + b > a; free x a
    a_worker_hands_back_memory_that_its_stream_uses: x = ready; elsewhere write x b; + elsewhere synchronize b; free x a
    freed_after_an_event_between_two_uses: x = ready; e = event; read x b; record b e; read x b; + record b e; wait a e;
        free x a
    a_view_outlives_its_buffer: x = ready; look x+1024 b 16; + b > a; free x a
    memory_of_a_graph_is_freed_beside_its_launch: x = ready; begin a; fill x 1 a; g = end; launch g a; + a > b; free x b
release while in use
    staging_memory_is_freed_after_the_event_of_another_batch: p = cuMemHostAlloc 4096 0; x = ready; e = event;
        f = event; record a e; cuMemcpyHtoDAsync x p 4096 a; record a f; synchronize f|e; cuMemFreeHost p
use before allocation
    used_after_the_wrong_stream_was_synchronised: x = new a; synchronize a|c; write x b
use after free
    a_loop_frees_what_the_next_step_uses: x = new a; at x a; - free x a; at x a; + free x a
    a_graph_is_replayed_after_its_input_was_dropped: x = ready; begin a; fill x 1 a; g = end; launch g a; - free x a;
        launch g a
    a_node_is_given_memory_that_is_freed: x = ready; y = ready; g = graph; n = node g x; r = launchable g;
        change g r n y; - free y; - synchronize a; cuGraphLaunch r a
    a_kernel_uses_a_page_that_was_unmapped: m = mapped; - unmap m; at m a
unmap while in use
    a_page_is_mapped_elsewhere_beside_a_kernel: m = mapped; at m a; + synchronize a; unmap m; synchronize device; map m
"""
)
programs(
    """
race
    the_context_of_the_other_device_is_synchronised: x = ready; p = peer; write x a; synchronize device|p; write x b
race
    a_peer_reads_before_the_copy_is_there: p = peer; s = stream_of p; y = of_device p s; synchronize s; x = ready;
        copy_to x y a; + a > s; read y s; synchronize a; synchronize s
free racing a use
    freed_while_a_peer_copies: p = peer; s = stream_of p; y = of_device p s; x = ready; copy_to x y s; + wait a s;
        free x a; synchronize s
""",
    gpus=2,
)
