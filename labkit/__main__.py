"""`python -m labkit`, the same as the `labkit` command."""

import sys

from labkit.lab.cli import main

sys.exit(main())
