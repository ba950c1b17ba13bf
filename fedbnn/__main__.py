"""`python -m fedbnn` is the command `fedbnn`."""

import sys

from fedbnn.cli import main

sys.exit(main())
