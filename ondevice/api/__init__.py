"""The functions that `import ondevice` offers; their needs are loaded when they are called."""
