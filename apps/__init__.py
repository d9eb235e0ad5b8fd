"""What a person runs: thin commands over the runtime. Nothing imports this package."""
