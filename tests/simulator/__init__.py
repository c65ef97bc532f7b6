"""Tests of the simulated driver itself: what the tests on both drivers cannot ask."""
