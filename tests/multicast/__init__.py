"""Tests of multicast objects and symmetric memory."""
