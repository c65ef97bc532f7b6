"""What each driver call means for the checker, by area; :mod:`.table` has them all by name."""
