"""`python -m everwarm`: the command line."""

from everwarm.cli import main

if __name__ == "__main__":
    main()
