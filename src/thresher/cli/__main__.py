"""Runs the command line as `python -m thresher.cli`, for when the command `thresher` is not on the path."""

from thresher.cli import main

if __name__ == "__main__":
    main()
