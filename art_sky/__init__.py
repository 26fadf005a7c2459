"""art-sky: train LLM agents by reinforcement learning on rented GPUs while the agent's code stays here.

Names are loaded when they are first used, so that `import art_sky` costs nothing (rule R8).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
