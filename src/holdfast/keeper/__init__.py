"""The keeper: a small process beside each worker that speaks for it.

A worker's event loop may be blocked and its interpreter lock held: a handler that computes, sleeps,
or sits in one long C call. So the signs of life come from another process, which shares memory
with the worker (`board`), has its own connection to NATS (`link`), watches whether the worker lives
(`vitals`), and beats, answers pings and extends messages for it (`process`).

Nothing here imports the rest of Holdfast, nor anything outside the standard library but `nkeys`
where a login needs it: the process is started without site-packages, and uses about 15 MB. All
names on the wire are given to it by the worker. The worker's side is `holdfast.worker.keeping`.
"""
