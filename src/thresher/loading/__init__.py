"""The user's DataLoader rebuilt, its order filtered by the plan."""
