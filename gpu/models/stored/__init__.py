"""What the files of a checkpoint hold: tensors, and the numbers that quantized ones mean."""
