"""One thread: networks here are small, and pytest's workers and the servers they start share the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by child processes too

pytest_plugins = ["ray_fixtures", "serving_fixtures"]
