"""What a notebook shows: pictures from data, source text, tables and panels.

    figures/      data -> Picture, a matplotlib figure that describes itself in words
    notebook.py   notebook(), show(), shapes(), tap(), Table: the first cell and the reader's tools
    widgets.py    Panel: sliders around a picture

Data comes in as plain rows and arrays, so nothing here knows the model or the engine.
"""
