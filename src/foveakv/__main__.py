"""`python -m foveakv` runs the command line."""

from foveakv.cli import main

if __name__ == "__main__":
    main()
