"""All that lives inside a training process: sensors, controls, guard, macro-batch, control loop, hook, logs."""
