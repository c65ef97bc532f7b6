"""Formats and tools that know no driver and no stream.

They are arrays of NumPy and DLPack (:mod:`.arrays`; :mod:`.lazy_numpy` imports NumPy late), HTML for notebooks
(:mod:`.html`), sizes as text (:mod:`.sizes`), ranges of addresses (:mod:`.ranges`), and locks on bytes of files
(:mod:`.locks`).
"""
