"""What operators see and do: runs, jobs, dead letters, and the audit of their actions."""
