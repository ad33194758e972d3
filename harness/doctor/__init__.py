"""What `ondevice doctor` looks at: the machine, what is installed, and how fast it computes."""
