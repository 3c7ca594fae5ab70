"""Measures a machine: what it is, how fast its links, memory, disks and arithmetic are, and what slows it down."""
