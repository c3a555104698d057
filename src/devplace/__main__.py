"""`python -m devplace`: the command line."""

from devplace.cli import main

if __name__ == "__main__":
    main()
