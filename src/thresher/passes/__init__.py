"""Forward passes that the library makes itself: refreshing, full passes, scoring, and scores before training; one engine."""
