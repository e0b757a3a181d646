"""Where the samples of the tasks come from, one source a file."""
