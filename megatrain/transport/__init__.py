"""Lanes, fences, slots, prefetch and drain."""
