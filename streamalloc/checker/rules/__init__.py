"""The rules of all driver calls, by area; :mod:`.all_calls` lists them by name."""
