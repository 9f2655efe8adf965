"""`python -m microserving`: the same as the `microserving` command."""

from __future__ import annotations

import sys

from microserving.cli.main import main

sys.exit(main())
