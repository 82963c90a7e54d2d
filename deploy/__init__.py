"""Running what serve/ and train/ make: images, stacks and clusters. Nothing in the repository imports this package."""
