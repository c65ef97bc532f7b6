"""Rules of the driver calls, listed by the name of the call in :mod:`.table`.

They are in :mod:`.work` (copies, fills, kernels), :mod:`.memory`, :mod:`.order` (streams, events, values) and
:mod:`.graphs`.
"""
