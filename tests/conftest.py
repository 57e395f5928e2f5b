"""Property tests draw the same examples in every run, and do not time the machine."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "robojax", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("robojax")
