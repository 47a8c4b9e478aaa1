"""What operators see and do: runs, jobs, dead letters, schedules, nodes, fleet, and the audit."""
