"""Random programs of driver calls, to be run on two drivers and compared.

A step is a line like ``alloc(n='a3', p='P0', size=1048576, s='s1')``; :mod:`.run` carries it out and says how the
driver answered: the result code, where an allocation lies in its pool, and the counters of pools that have changed.
:mod:`.make` makes programs. ``h200.txt.xz`` has programs with the answers of an NVIDIA H200, driver 580.159.
"""
