"""What training and serving must agree on: contract, preprocessing, sealed directories, bundles, pins.

Runs in both environments, imports neither `train` nor `serve`, and never imports torch.
"""

__version__ = "0.1.0"
