"""Single passes over a device: the tokens that they compute, how they are launched, and the time that they take."""
