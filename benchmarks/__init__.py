"""What the library costs, measured; results as JSON under `results/`."""
