"""The plain training loop of the experiments, and where its results are kept."""
