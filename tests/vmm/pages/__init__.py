"""Tests of pages that move."""
