"""What makes a run trustworthy: each module is one small guard that works in any training loop.

`store` (atomic checkpoints), `manifest` (what a complete checkpoint is), `iterable` (the position in a stream of
samples), `oom`, `update` and `advice` (out of memory), `trial` (one step on the longest batch before training),
`numbers` (NaN and loss spikes), `signals` (SIGTERM and friends), `fingerprint` (what a resumed run must agree on),
`startup` (faults visible before the first step), `trust` (no pickle, no path that leaves its folder).
"""
