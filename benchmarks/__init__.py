"""Measures what the library costs; writes the results as JSON to `results/`."""
