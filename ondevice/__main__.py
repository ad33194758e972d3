"""`python -m ondevice`."""

import sys

from ondevice.cli.main import main

sys.exit(main())
