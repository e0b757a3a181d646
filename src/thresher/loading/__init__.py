"""The user's DataLoader, rebuilt such that it yields only the chosen samples."""
