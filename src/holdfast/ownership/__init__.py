"""Who holds what: claims on runs, leases on roles, and heartbeats that show a holder is alive."""
