"""The rules of all driver calls, by area; :mod:`.table` lists them by name."""
