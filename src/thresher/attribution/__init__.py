"""Which samples a loss belongs to, and how its signals reach the records."""

from thresher.attribution.rows import AttributionError as AttributionError
