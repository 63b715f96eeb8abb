"""python -m ltx_inductor"""

import sys

from ltx_inductor.cli import main

sys.exit(main())
