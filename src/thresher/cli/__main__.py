"""`python -m thresher.cli`, where the command `thresher` is not on the path."""

from thresher.cli import main

if __name__ == "__main__":
    main()
