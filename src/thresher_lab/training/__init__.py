"""The plain training loop of the experiments, its checkpoints, the folder of its results, and methods written as text."""
