"""The smallest run that learns: sums with a calculator, a model of a hundred thousand weights."""
