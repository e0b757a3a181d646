"""Training in several processes: rank 0 keeps the records and makes the plans, and the other ranks follow them."""
