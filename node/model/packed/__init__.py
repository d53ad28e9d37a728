"""Float32 numbers in fewer bytes, and the narrow matrices that products are made with."""
