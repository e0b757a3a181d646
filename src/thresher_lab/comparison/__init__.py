"""Compares methods with full training and with controls of equal cost."""
