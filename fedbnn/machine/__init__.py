"""The machine below: its devices, its memory, its garbage, and what libraries lack or overdo."""
