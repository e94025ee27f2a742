"""`python -m metakernelbench` is the `mkb` command."""

from metakernelbench.cli.app import main

if __name__ == "__main__":
    main()
