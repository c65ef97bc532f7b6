"""Checks of stream order: :func:`streamalloc.driver.checked`.

How a hazard is found, for a race of ``cuMemsetD8Async`` on one stream with work of another stream:

1. ``wrapper.CheckedDriver._observe`` gets the call of the program. Its ``_call`` forwards the call to the wrapped
   driver between ``Recorder.begin_call`` and ``Recorder.end_call``.
2. Both run the rule of the call, from ``rules.table.RULES``, in their turn (``_record``, ``_Turn.taking``). A rule is a
   generator or a function. A generator (``Rule.around``) yields where the driver makes the call. ``begin_call`` runs
   its first half, the code before the ``yield`` (``_apply``, ``uses.run_before``). ``end_call`` sends the driver's
   answer to the ``yield``, which runs the second half (``_after``). A function (``Rule.after``) is called by ``_after``
   if the driver call has succeeded.
3. The first half of the rule (here ``rules.work._works``) finds the memory (``uses.look_up``), and reports memory that
   is freed already (``uses.stale``). The second half queues a use of it (``uses.queue_use``).
   ``clocks.Timeline.submit`` runs ``uses.check_uses`` once everything before the use is known; during the call, unless
   the stream waits for something.
4. ``judge.Judge.use`` compares the use with the recorded uses of the same bytes (``ranges.Bytes.record_access``) by the
   clocks of their streams. It reports two uses without an order as a ``Hazard``.
5. ``report.Reports`` collects the hazards of the call. Hazards of known places are only counted; ``deliver`` shows or
   raises the others.

A free takes another way from step 3 on, because it must be recorded before the driver makes it: another thread may get
the memory during the call. The first half of ``rules.memory.cuMemFreeAsync`` submits ``Judge.free``, which compares the
free with the last uses of the memory, and records it. That happens before the call, unless the stream waits for
something. If the driver refuses the call, the second half undoes the record.

**Ordered** means: the earlier operation comes first in every possible run. An order needs

* between streams: an event, a value in memory that one stream writes and the other waits for, or the rules of the
  legacy stream;
* between a stream and the host: a wait of the host. All host threads count as one thread, because threads order each
  other in ways that no driver call shows;
* between processes: an interprocess event or a value in shared memory (:mod:`.interprocess`).

A choice of the driver, such as a free address, orders nothing. A hazard says so if only a choice separates its
operations.
"""

from streamalloc.checker.wrapper import CheckedDriver

__all__ = ["CheckedDriver"]
