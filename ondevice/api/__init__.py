"""The functions that `import ondevice` offers; what they need is loaded when they are called."""
