"""`python -m fedbnn` is the command `fedbnn`."""

import sys

from fedbnn.cli.main import main

sys.exit(main())
