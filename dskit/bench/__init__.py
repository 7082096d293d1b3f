"""Benchmarks: what is timed, beside what, and under which settings; one file per question.

`latency` answers how fast one stream and eight are, beside transformers. `environment` is the header that
every result carries: without it a figure cannot be compared with another.
"""
