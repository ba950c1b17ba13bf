"""What things cost, measured side by side in one run: ratios, because machines are shared and noisy."""
