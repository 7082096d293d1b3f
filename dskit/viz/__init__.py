"""What a notebook shows: pictures from data, source text, tables and panels.

    figures/      data -> Picture, a matplotlib figure that describes itself in words
    notebook.py   notebook(), show(), shapes(), tap(), Table: the first cell and the reader's tools
    widgets.py    Board, the frame of every panel; Panel: sliders around a picture
    swap.py       KernelSwap: which implementation each group of ops runs
    live.py       LiveProfile: where the time of a running engine goes
    blocks.py     CacheMap: who holds which cache block, step by step
    experts.py    ExpertLoad: tokens per expert and layer

Figures and boards know rows alone. A panel asks the LLM that it is given, by calls that a reader would make.
"""
