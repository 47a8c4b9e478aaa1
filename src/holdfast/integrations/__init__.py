"""Holdfast under other frameworks: their names and conventions on our connection and leases."""
