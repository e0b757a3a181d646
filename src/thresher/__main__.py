"""Runs the command line as `python -m thresher`; torchrun and accelerate launch start it this way."""

from importlib.metadata import entry_points

if __name__ == "__main__":
    # The command is in another package, which the library does not import by name: it is found in the installed metadata.
    for command in entry_points(group="console_scripts", name="thresher"):
        command.load()()
