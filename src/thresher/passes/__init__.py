"""Forward passes of our own: one engine for refreshing, surveying and scoring."""
