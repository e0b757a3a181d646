"""The data of the tasks; one source per file."""
