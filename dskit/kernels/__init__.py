"""Triton kernels, one file per layer file of the same stem; dskit/ops.py imports them by name when asked.

A kernel file: what it tiles and fuses, the kernels, a wrapper per op that checks and launches, and the
registration. The same source runs compiled on a GPU and interpreted on a CPU (TRITON_INTERPRET=1, set before
the first import); what differs between the two lives in common.py.
"""
