"""Clients as LightningModules."""

import fedbnn as _fedbnn
