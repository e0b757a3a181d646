"""Methods held against full training and controls of equal cost."""
