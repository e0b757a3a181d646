"""What uses the library: real tasks, a plain training loop, comparisons at equal cost, recipes, reports and commands."""
