"""Tests of virtual memory by hand (``streamalloc.vmm``)."""
