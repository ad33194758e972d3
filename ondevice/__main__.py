"""`python -m ondevice`: the same as the console script `ondevice`."""

import sys

from ondevice.cli.main import main

sys.exit(main())
