"""Records in shards: what the ranks of a training tell each other, so that their plans are those of one process."""
