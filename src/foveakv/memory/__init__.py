"""Where kept keys and values are stored: packed slots, quantized slots, backing stores with digests."""
