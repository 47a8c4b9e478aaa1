"""Uptime: HTTP, TLS and TCP monitoring on the public API of Holdfast, and nothing else.

    schedules ──► probe, a run per slot ──► result, state (CAS) ──► notify, a keyed run per notice
                                                       │
                                                       └──► status page

Whatever this package needs, a program of yours can import from `holdfast` too: jobs, schedules at
run time, buckets. The one exception is `uptime.demo`, which starts and kills processes.
"""
