"""`python -m eyas`, and `torchrun -m eyas`."""

from eyas.cli import main

main()
