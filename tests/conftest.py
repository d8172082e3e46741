"""What all tests share: no test depends on how fast the machine is."""

from hypothesis import settings

settings.register_profile("triptych", deadline=None)
settings.load_profile("triptych")
