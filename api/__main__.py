"""`python -m foredraft`: the same as the command `foredraft`."""

from foredraft.cli.__main__ import main

if __name__ == "__main__":
    main()
