"""See scripts/conformance."""

import sys

from cases import main

sys.exit(main(sys.argv[1:]))
