"""Records in shards: the ranks exchange what they need so that their plans are those of one process."""
