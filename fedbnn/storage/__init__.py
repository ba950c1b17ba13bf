"""The run directory: committed rounds, records, whole files, locks."""
