"""Runs the command line as `python -m thresher`, which is how torchrun and accelerate launch start it."""

from thresher.cli import main

if __name__ == "__main__":
    main()
