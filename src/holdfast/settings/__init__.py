"""Settings: a tree of files for the agents it targets, and secrets only for entitled agents."""
