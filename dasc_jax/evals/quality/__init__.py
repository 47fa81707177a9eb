"""The quality study: what compressed checkpoints cost on RULER, measured and put on a page."""
