"""Rules of the driver calls. A rule has the name of its call; :mod:`.table` has all rules by this name.

:mod:`.work` has the rules of copies, fills and kernels, :mod:`.streams` those of streams, events and values in memory.
:mod:`.memory` and :mod:`.graphs` have the other rules.
"""
