from __future__ import annotations

import sys

from art_sky.server.main import main

sys.exit(main())
