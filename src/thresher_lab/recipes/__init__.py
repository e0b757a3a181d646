"""The papers' experiments at full size, one YAML file each; each can also be run as a small smoke test."""
