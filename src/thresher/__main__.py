"""Runs the command line as `python -m thresher`, which is how torchrun and accelerate launch start it."""

from importlib.metadata import entry_points

if __name__ == "__main__":
    # The command is another package's, which the metadata of the installation names: the library does not know it.
    for command in entry_points(group="console_scripts", name="thresher"):
        command.load()()
