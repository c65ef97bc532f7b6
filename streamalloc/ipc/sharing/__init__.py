"""How memory is shared with other processes, and opened there.

Between them: ``descriptor`` (what travels) and ``control_block`` (words that both sides write and wait for).

The exporter: ``share`` (the mechanism for each kind of memory), ``exports`` (the table of what this process has
shared), ``lease`` (what keeps a shared allocation until importers are done), ``sending`` (over a channel).

The importer: ``opening`` (what to do with a descriptor), ``importer`` (the table of what this process has opened),
``imports`` (the life of one allocation), ``pools`` (of other processes), ``handles`` (that came with a descriptor),
``drops`` (the thread that lets go of what was dropped).

``multiprocess`` does both through :mod:`multiprocessing`.
"""

__all__: list[str] = []
