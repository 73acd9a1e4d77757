"""`python -m lockstep`, as torchrun calls it."""

from lockstep.cli.main import main

if __name__ == "__main__":
    main()
