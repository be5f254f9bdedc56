"""`python -m maxmoe`."""

import sys

from maxmoe.cli.main import main

sys.exit(main())
