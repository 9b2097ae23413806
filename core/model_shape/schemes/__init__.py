"""How each method of quantization writes down which matrices have which format."""
