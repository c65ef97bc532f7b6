"""Tests of stores for sleeping memory, and of agreement before it sleeps."""
