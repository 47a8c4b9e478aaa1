"""Faults: real processes, real signals, and effects recorded outside the system."""
