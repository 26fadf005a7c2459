"""Showing a run to people: trackers such as Weights & Biases, and charts.

`start` is called where rows are made (the client, after each `log` and `train`), so that tracking needs nothing
from the server. It is opt-in: by WANDB_API_KEY in the environment, or by `report_to="wandb"`.
"""

from __future__ import annotations

from art_sky.tracking.trackers import Tracking, start

__all__ = ["Tracking", "start"]
