"""The version of ondevice."""

__version__ = "0.1.0"
