"""Training methods: how one step turns a batch into an update of the adapters."""
