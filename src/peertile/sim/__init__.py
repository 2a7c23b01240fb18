"""A simulated machine: many agents on one thread, exact happens-before, seeded schedules. Never imports the runtime."""
