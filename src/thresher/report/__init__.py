"""What a comparison found, as one HTML page that needs nothing else."""
