"""The checks of `ondevice doctor`: the machine, its packages, and how fast it computes."""
