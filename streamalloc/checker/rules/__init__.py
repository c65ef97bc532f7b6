"""Rules of the driver calls, listed by the name of the call in :mod:`.table`.

:mod:`.work` has the rules of copies, fills and kernels, :mod:`.streams` those of streams, events and values in memory.
:mod:`.memory` and :mod:`.graphs` have the others.
"""
