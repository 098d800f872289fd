"""Classical policies: static settings, the PID family, and the default climb under a memory safety loop."""
