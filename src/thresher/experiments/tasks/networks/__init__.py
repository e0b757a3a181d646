"""The networks of the tasks."""
