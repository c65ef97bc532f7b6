"""Set-up of symmetric memory over several processes. It succeeds on all ranks or fails on all ranks."""
