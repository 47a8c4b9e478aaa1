"""Documentation: its commands work, the code is covered, and every link resolves."""
