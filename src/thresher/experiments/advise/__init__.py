"""What can be saved on a training, before it is spent."""
