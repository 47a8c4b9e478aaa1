"""Uptime: HTTP, TLS and TCP monitoring, built only on the public API of Holdfast.

    schedules ──► probe, a run per slot ──► result, state (CAS) ──► notify, a keyed run per notice
                                                       │
                                                       └──► status page

Everything this package needs, your programs can import from `holdfast` too: jobs, schedules at run
time, buckets.
"""
