"""The runtime of custody: admission, tensors, workers, the codec of each link."""
