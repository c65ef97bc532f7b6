"""Set-up of symmetric memory over several processes: it succeeds on all ranks, or fails on all."""
