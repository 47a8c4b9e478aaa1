"""The keeper: a small process beside each worker that sends its signs of life.

A worker's event loop may be blocked and its interpreter lock held by a handler that computes,
sleeps, or sits in one long C call. So the signs of life come from another process, which shares
memory with the worker (`board`), has its own connection to NATS (`link`), watches whether the
worker lives (`vitals`), and sends heartbeats, answers pings and extends messages (`process`).

Nothing here imports the rest of Holdfast, nor anything outside the standard library but `nkeys`
where a login needs it: the process starts without site-packages and uses about 15 MB. The worker
passes it all names used on the wire. The worker's side is `holdfast.worker.keeping`.
"""
