"""Training: images -> run -> checkpoint -> evaluation -> bundle. Hands over sealed directories, imports `slipway`."""
