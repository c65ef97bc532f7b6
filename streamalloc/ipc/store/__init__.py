"""Stores of GPU memory: a server process that holds weights, and the processes that write and read them."""
