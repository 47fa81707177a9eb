"""Evaluations: RULER, end tasks, prefix reuse, and the statistics that compare arms."""
