"""The machine below: its devices, its memory, and what an installed torchvision may lack."""
