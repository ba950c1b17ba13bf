"""Clients as LightningModules."""

import fedbnn as _fedbnn  # noqa: F401  (first, before torchvision)
