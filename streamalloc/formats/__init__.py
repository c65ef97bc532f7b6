"""Formats and tools that use no driver and no stream.

The modules are for arrays of NumPy and DLPack (:mod:`.arrays`), a late import of NumPy (:mod:`.lazy_numpy`), HTML for
notebooks (:mod:`.html`), sizes as text (:mod:`.sizes`), ranges of addresses (:mod:`.ranges`), and locks on bytes of
files (:mod:`.locks`).
"""
