"""`python -m hvdtrain` is the same as `hvdtrain`."""

from hvdtrain.cli import main

if __name__ == "__main__":
    main()
