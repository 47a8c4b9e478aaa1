"""Who holds what: claims on runs, and the heartbeats that tell whether a holder is alive."""
