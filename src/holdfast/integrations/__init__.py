"""Holdfast under other frameworks: their names and habits, our connection, leases and pull loop."""
