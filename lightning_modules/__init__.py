"""Clients as LightningModules."""

import fedbnn as _fedbnn  # noqa: F401  (first: it makes torchvision importable beside a CPU-only torch)
