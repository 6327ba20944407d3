"""Reading, formatting, tokenising and packing data; the embedded corpora."""
