"""The tests of streamalloc; ``pytest --driver=simulated`` (the default) or ``--driver=cuda``."""
