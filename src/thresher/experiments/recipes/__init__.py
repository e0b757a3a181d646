"""The papers' experiments at full size, a YAML file each, and small enough to try out: see `thresher recipes`."""
