"""The machine below: its devices, its memory, its garbage, and what torchvision may lack."""
