"""Which samples a loss belongs to, and the way of its signals to the records."""

from thresher.attribution.rows import AttributionError as AttributionError
