"""Plants: what a policy is tried on. `physics` holds the equations, `profile` the constants."""
