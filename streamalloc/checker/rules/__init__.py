"""The rules of the driver calls: :mod:`.work` (copies, fills, kernels), :mod:`.memory`, :mod:`.order` (streams, events,
values) and :mod:`.graphs`. :mod:`.table` lists them by the name of the call.
"""
