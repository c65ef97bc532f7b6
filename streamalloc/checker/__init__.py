"""Checks of stream order: :func:`streamalloc.driver.checked`.

How a hazard is found, for the race of ``cuMemsetD8Async(x, ..., b)`` with earlier work of another stream:

1. ``wrapper.CheckedDriver._observe`` gets the call of the program. It forwards the call to the wrapped driver between
   ``Recorder.begin_call`` and ``Recorder.end_call``.
2. ``wrapper.Recorder`` takes its lock and looks up the rule of the call in ``rules.table.RULES``: a generator that runs
   before the call and gets the driver's answer where it yields (``Rule.around``), or a function that is called after a
   success (``Rule.after``).
3. The rule (here ``rules.work``) finds the stream and the memory in ``state.State`` and queues a use:
   ``uses.queue_use``. ``clocks.Timeline.submit`` runs ``uses.touch`` once everything before the use is known; during
   the call, unless the stream waits for something.
4. ``judge.Judge.use`` compares the use with the recorded uses of the same bytes (``ranges.Bytes.touch``) by the clocks
   of their streams. It reports two uses without an order as a ``Hazard``.
5. ``report.Reports`` collects the hazards of the call. Hazards of known places are only counted; ``deliver`` shows or
   raises the others.

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
