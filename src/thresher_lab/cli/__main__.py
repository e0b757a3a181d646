"""Runs the command line as `python -m thresher_lab.cli`, for when the command `thresher` is not on the path."""

from thresher_lab.cli import run_command

if __name__ == "__main__":
    run_command()
